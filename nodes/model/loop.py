"""What a ComfyUI guider has prepared, as a job for ComfyUI's own loop in the ranks: data, and nothing that is Python's.

A request that carries more than data stays with the loop of this process, which runs it call by call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import comfy.conds
import comfy.model_sampling
import comfy.samplers
from torch import Tensor, nn

from ...parallel_backend.errors import RequestError
from ...parallel_backend.models.comfyui.calls import made_replaced
from ...parallel_backend.planner.plan import job_from_latent
from ...parallel_backend.planner.workload.workload import Job, JobModel
from ...parallel_backend.requests import SEVERAL_CALLS, LoopRequest
from ...parallel_backend.wire.arguments import Tree
from ...parallel_backend.wire.loop import check_loop
from ...parallel_backend.wire.payloads import check_module_inputs
from .arguments import OPTIONS, as_tree, options_as_tree
from .module_network import RemoteModule, reference_shapes
from .unsupported import RunsStepwise, carried, has_entries

# What ComfyUI reads of a prompt in each model call, beside its model_conds; the rest has gone into those.
_READ = ("area", "strength", "mask", "mask_strength", "timestep_start", "timestep_end", "default")
# What else of a prompt takes part in model calls, and lives in this process, in a user's words.
_LIVE = {"control": "a ControlNet", "hooks": "hooks", "gligen": "GLIGEN"}
# Of the model options those that are looked at apart, a list of what moves to the device with the model, and how to
# compile, of which the ranks know (patcher.py).
_NOT_READ = (OPTIONS, "to_load_options", "torch_compile_kwargs")
# Parts of a model that may be replaced: the first is sent, the other is the ranks' own.
_REPLACED = {"model_sampling", "manual_cast_dtype"}


def loop_request(
    name: str,
    guider: comfy.samplers.CFGGuider,
    sigmas: Tensor,
    extra_args: dict,
    noise: Tensor,
    latent: Tensor,
    denoise_mask: Tensor | None,
) -> LoopRequest:
    """The whole job. Raises RunsStepwise for one that only this process can run, RequestError for bad input."""
    _check_plain(name, guider, extra_args["model_options"])
    network: RemoteModule = guider.inner_model.diffusion_model
    try:
        request = LoopRequest(
            noise=noise.float().cpu(),
            latent=latent.float().cpu(),
            sigmas=sigmas.float().cpu(),
            conds={
                side: [_prompt(prompt) for prompt in prompts]
                for side, prompts in guider.conds.items()
                if side == "positive" or prompts
            },
            cfg=float(guider.cfg),
            sampler=name,
            seed=extra_args["seed"] or 0,
            options=_options(extra_args["model_options"]),
            sampling=_described(guider.inner_model.model_sampling),
            mode=network.verdict.mode,
            denoise_mask=None if denoise_mask is None else denoise_mask.float().cpu(),
        )
    except RequestError:  # an object of Python among them: what that is, the model call says where it matters
        raise RunsStepwise("the model or a prompt carries what only ComfyUI's process has") from None
    check_loop(request)
    for prompts in request.conds.values():
        for prompt in prompts:
            _, context = prompt["model_conds"].get("c_crossattn", ("", None))
            check_module_inputs(None if _is_packed(prompt) else request.noise, context, network.file.inputs)
    return request


def loop_job(model: JobModel, request: LoopRequest) -> Job:
    """As planning sees it: like each of the model calls that this process would make for it."""
    prompt = request.conds["positive"][0]
    conds = {name: value for name, (_, value) in prompt["model_conds"].items()}
    context, shapes = conds.get("c_crossattn"), conds.get("latent_shapes") or [request.noise.shape]
    # Samplers of this name ask for the negative prompt at cfg 1 too.
    has_cfg = "negative" in request.conds and (request.cfg != 1.0 or request.sampler.endswith("cfg_pp"))
    job = job_from_latent(
        model,
        (len(request.noise), *shapes[0][1:]),
        text=context.shape[-2] if isinstance(context, Tensor) and context.ndim > 1 else 0,
        has_cfg=has_cfg,
        steps=len(request.sigmas) - 1,
        references=reference_shapes(conds),
    )
    calls = SEVERAL_CALLS.get(request.sampler, 1)
    return replace(job, model_calls=calls, step_cache=request.cache_threshold > 0)


def _check_plain(name: str, guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
    """Raises RunsStepwise for what is a function or an object of this process, and where no model call is made."""
    function = getattr(comfy.samplers.sampler_object(name), "sampler_function", None)
    if not str(getattr(function, "__module__", "")).startswith("comfy."):
        raise RunsStepwise(f"the sampler {name} is another pack's")
    if not guider.conds["positive"]:
        raise RunsStepwise("the positive conditioning holds no prompt")
    replaced = sorted(set(guider.model_patcher.object_patches) - _REPLACED)
    if replaced:
        raise RunsStepwise(f"the model has another {', '.join(replaced)}")
    options = model_options.get(OPTIONS, {})
    live = [
        *(
            key
            for key, value in model_options.items()
            if key not in _NOT_READ and not isinstance(value, (bool, int, float, str)) and has_entries(value)
        ),
        *(
            key
            for key in ("wrappers", "callbacks", "patches", "patches_replace")
            if has_entries(options.get(key))
        ),
    ]
    if live:
        raise RunsStepwise(carried(live))
    for side, prompts in guider.conds.items():
        for prompt in prompts or ():
            found = [words for key, words in _LIVE.items() if prompt.get(key) is not None]
            if found:
                raise RunsStepwise(f"the {side} conditioning carries {', '.join(found)}")


def _prompt(prompt: dict) -> dict[str, Tree]:
    read = {name: as_tree(prompt[name], f"a prompt's {name}") for name in _READ if name in prompt}
    return {**read, "model_conds": dict(_model_conds(prompt["model_conds"]))}


def _model_conds(conds: dict[str, comfy.conds.CONDRegular]) -> Iterator[tuple[str, Tree]]:
    for name, cond in conds.items():
        if type(cond).__module__ != comfy.conds.__name__ or set(vars(cond)) != {"cond"}:
            raise RunsStepwise(f"a prompt carries {name}, which only this ComfyUI process knows")
        value = made_replaced(name, cond.cond, lambda: None)
        yield name, (type(cond).__name__, as_tree(value, f"the prompt's {name}"))


def _options(model_options: dict) -> dict[str, Tree]:
    plain = {
        key: as_tree(value, f"the option {key!r}")
        for key, value in model_options.items()
        if key not in _NOT_READ
    }
    return {**plain, OPTIONS: options_as_tree(model_options.get(OPTIONS, {}))}


def _described(sampling: object) -> dict[str, Tree]:
    """The classes in comfy.model_sampling that it is made of, and its state. Raises RunsStepwise for another one."""
    kind = type(sampling)
    classes = (kind,) if kind.__module__ == comfy.model_sampling.__name__ else kind.__bases__
    own = () if classes == (kind,) else [name for name, value in vars(kind).items() if callable(value)]
    if own or any(base.__module__ != comfy.model_sampling.__name__ for base in classes):
        raise RunsStepwise("the model's sampling was replaced by one that only ComfyUI knows")
    buffers = dict(sampling.named_buffers()) if isinstance(sampling, nn.Module) else {}
    values = {name: value for name, value in vars(sampling).items() if name not in vars(nn.Module())}
    return {
        "classes": [base.__name__ for base in classes],
        "buffers": as_tree(buffers, "the model's sampling"),
        "values": as_tree(values, "the model's sampling"),
    }


def _is_packed(prompt: dict) -> bool:
    """Whether the latent is several in one (video and sound)."""
    _, shapes = prompt["model_conds"].get("latent_shapes", ("", ()))
    return len(shapes) > 1
