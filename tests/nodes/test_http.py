"""The host names under which a page may use the pack's routes."""

import pytest

from pack_nodes import import_node_module

http = import_node_module("nodes.routes.http")

NAMES = ["localhost:8188", "127.0.0.1:8188", "[::1]:8188", "comfy.localhost", "192.168.1.7:8188"]


@pytest.mark.parametrize("host", NAMES)
@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1,::1", "localhost"])
def test_loopback_names_and_addresses_are_known(host, listen):
    assert http.is_known_host(host, listen)


@pytest.mark.parametrize(
    "host", ["elsewhere.example", "elsewhere.example:8188", "localhost.elsewhere.example", ""]
)
def test_a_foreign_name_is_not_known_where_only_this_computer_may_ask(host):
    assert not http.is_known_host(host, "127.0.0.1,::1")


@pytest.mark.parametrize("listen", ["0.0.0.0", "0.0.0.0,::", "192.168.1.7", "comfy.example", ""])
def test_a_comfyui_that_others_may_reach_has_names_that_it_does_not_know(listen):
    assert http.is_known_host("id-8188.proxy.example", listen)
