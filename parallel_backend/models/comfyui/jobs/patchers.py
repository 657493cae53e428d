"""ComfyUI's ModelPatcher in a rank: for the model that the rank holds, and for models that come with a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from ....errors import RequestError
from ..formats.gguf import is_packed, unpacked
from ..formats.slices import Cut, is_plain
from ..placing import moved
from .mapped import find_in

if TYPE_CHECKING:
    from ..file_weights import FileWeights
    from ..model import ComfyUIModel

_OWNED = ("weight", "bias")
_PREFIX = "diffusion_model."  # of the network's names in ComfyUI's BaseModel

_Patcher: Any = (
    object  # stands for ComfyUI's ModelPatcher or its subclass, before which the classes below are mixed in
)


class _Backup(NamedTuple):
    """ComfyUI's backup of a weight before a patch, in ComfyUI's form."""

    weight: torch.Tensor
    inplace_update: bool


def root_patcher(model: ComfyUIModel) -> Any:
    """Returns the patcher of the model that the rank holds, whose weights stay in place. Make only one per model: it
    records which patches are in the weights."""
    from comfy.model_patcher import ModelPatcher

    mixins: list[type] = [_Root]
    if model.byte_sharding is not None:
        mixins.insert(0, _Sharded)
    elif any(is_packed(parameter) for parameter in model.patcher.model.parameters()):
        mixins.insert(0, _LateHooks)
    if model.cuts:
        mixins.insert(0, _Sliced)
    kind: Any = _kind_of(ModelPatcher, *mixins, held=model, files=model.files)
    found = kind(model.patcher.model, model.patcher.load_device, model.patcher.offload_device)
    found.offload_device = found.load_device
    return found


def encoder_patcher(kind: type, module: Any, device: torch.device) -> Any:
    """Returns a patcher of class `kind` for a text encoder. ComfyUI's memory manager moves its weights to `device` and
    back."""
    return _kind_of(kind, _InRank)(module, load_device=device, offload_device=torch.device("cpu"))


def local_patcher(root: Any, state: Sequence[str]) -> Any:
    """Returns a clone that has only the attributes in `state`; the others come from ComfyUI's process."""
    kind: Any = type(root)
    found = kind.__new__(kind)
    found.__dict__.update({name: root.__dict__[name] for name in state if name in root.__dict__})
    found.parent = None
    return found


def other_patcher(device: torch.device) -> Any:
    """Returns the patcher of another model in the job, which ComfyUI's memory manager moves to `device`."""
    from comfy.model_patcher import ModelPatcher

    found = ModelPatcher.__new__(ModelPatcher)
    found.__dict__.update(
        backup={},
        backup_buffers={},
        object_patches_backup={},
        pinned=set(),
        parent=None,
        size=0,
        load_device=device,
        offload_device=torch.device("cpu"),
        hook_backup={},
        cached_patcher_init=None,
    )
    return found


def loaded_patchers(base: Any) -> list[object]:
    """Returns the patchers of ComfyUI's model `base` that its memory manager lists as loaded."""
    from comfy import model_management

    patchers = [loaded.model for loaded in model_management.current_loaded_models]
    return [patcher for patcher in patchers if patcher is not None and patcher.model is base]


def find_unpatched(patcher: Any, kind: str, path: str) -> Any:
    """Returns what mapped.find_in returns; a weight that an earlier job's patches are in as it was before them."""
    backup = patcher.backup.get(path) if kind == "param" else None
    return find_in(patcher.model, kind, path) if backup is None else backup.weight


def _kind_of(base: type, *mixins: type, **members: Any) -> type:
    return type(base.__name__, (*mixins, base), {"__module__": base.__module__, **members})


class _InRank(_Patcher):
    """A patcher in a rank. `files`: reads the model's weights again, None if that is not possible."""

    files: FileWeights | None = None

    # Outside of inference mode ComfyUI can create quantised parameters.
    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, *args: Any, **kwargs: Any) -> None:
        super().load(*args, **kwargs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def model_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().model_state_dict(*args, **kwargs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        """Loads weights whose backup is the file from there, and leaves the rest to ComfyUI."""
        if unpatch_weights and self.files is not None:
            self.unpatch_hooks()  # first: its backups are weights with the job's own patches
            again = [key for key, backup in self.backup.items() if self.files.is_original(key, backup.weight)]
            self.files.put(again)
            for key in again:
                del self.backup[key]
        super().unpatch_model(device_to, unpatch_weights)

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        """Patches a weight that this rank has. A packed one (GGUF) is unpacked first, since nothing can pack it again,
        and is itself the backup. For a weight with the file's values, the mapped parameter is the backup: one on the
        device would take as much memory as the weight."""
        from comfy.utils import get_attr, set_attr_param

        weight = get_attr(self.model, key)
        if weight.numel() == 0:
            return None
        if key in self.patches and is_packed(weight):
            self.backup.setdefault(key, _Backup(weight, False))
            set_attr_param(self.model, key, unpacked(weight))
        elif (
            key in self.patches
            and self.files is not None
            and (original := self.files.original(key)) is not None
        ):
            self.backup.setdefault(key, _Backup(original, False))
        return super().patch_weight_to_device(key, *args, **kwargs)

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: Any, key: str, *args: Any, **kwargs: Any
    ) -> None:
        """Patches a weight with a prompt's LoRA (hooks), if this rank has the weight."""
        from comfy.utils import get_attr

        if get_attr(self.model, key).numel():
            super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kwargs)


class _Root(_InRank):
    """The patcher of the model that the rank holds, `held`. ComfyUI asks it how many prompts fit into a call, and how
    much of the weights onto the device. The planner has decided both."""

    held: ComfyUIModel

    def get_free_memory(self, device: Any) -> int:
        return sys.maxsize

    def model_size(self) -> int:
        return 1

    def loaded_size(self) -> int:
        return 1


class _LateHooks(_Patcher):
    """Applies the LoRAs of a prompt's hooks when a weight is used, after those of the whole job."""

    def patch_hooks(self, hooks: Any) -> None:
        self.unpatch_hooks()
        patches = {} if hooks is None else self.get_combined_hook_patches(hooks=hooks)
        for key, found in patches.items():
            self.hook_backup[key] = _LatePatch(self, key, found)
            _functions_of(self, key).append(self.hook_backup[key])
        self.current_hooks = hooks

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        for key, function in self.hook_backup.items():
            functions = _functions_of(self, key)
            if function in functions:
                functions.remove(function)
        self.hook_backup.clear()
        self.current_hooks = None


class _Sharded(_LateHooks):
    """Patches weights of which each rank has a share (shard_weights), or a share of a slice: the whole weight from the
    file, as ComfyUI does, of which the rank then stores its share. Weights that a patch makes larger, and packed ones
    (GGUF), are patched on use, as ComfyUI patches offloaded ones: they are gathered only while their block runs."""

    patches: dict[str, Any]

    @torch.inference_mode(False)
    @torch.no_grad()
    def load(self, device_to: Any = None, *unused: Any, **options: Any) -> None:
        from comfy.utils import get_attr

        # ComfyUI lists the modules whose weights it patches: those without others inside.
        listed = {f"{name}.{own}" for *_, name, _, parameters in self._load_list() for own in parameters}
        patches, originals = self.patches, self.held.originals
        late, shapes = dict[str, Any](), dict[str, Sequence[int]]()
        for key in listed & patches.keys():
            weight = get_attr(self.model, key)
            if weight is None:
                continue  # a bias that another rank has
            shape = _shape_with(patches[key], weight, key)
            if shape != weight.shape or key not in originals or is_packed(originals[key]):
                _functions_of(self, key)  # refuses a layer that has none
                late[key], shapes[key.removeprefix(_PREFIX)] = patches[key], shape
            elif key not in self.backup:
                self.backup[key] = _Backup(weight, False)
                self._store(key, patched=True)
        self.held.byte_sharding.show_shapes(shapes)
        self.patches = late
        try:
            super().load(device_to, 0, False, False)
        finally:
            self.patches = patches
        # Each layer has its weights where it computes, unlike those that ComfyUI has offloaded.
        for layer in self.model.modules():
            if hasattr(layer, "prev_comfy_cast_weights"):
                layer.comfy_cast_weights = layer.prev_comfy_cast_weights
        for key, cut in self.held.cuts.items():
            path, _, name = key.rpartition(".")
            layer = self.model.get_submodule(path)
            if hasattr(layer, "comfy_cast_weights"):
                setattr(layer, f"{name}_function", _OnWhole(self, key, cut))

    @torch.inference_mode(False)
    @torch.no_grad()
    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            for key in list(self.backup):
                self._store(key, patched=False)
                del self.backup[key]
        super().unpatch_model(device_to, unpatch_weights)

    def pin_weight_to_device(self, key: str) -> None:
        pass

    def _store(self, key: str, *, patched: bool) -> None:
        """Stores this rank's share of the file's weight, with or without the patches."""
        from comfy.utils import get_attr, set_attr_param

        sharding, name, cut = self.held.byte_sharding, key.removeprefix(_PREFIX), self.held.cuts.get(key)
        if not sharding.keeps(name):
            return
        absent = get_attr(self.model, key)
        value: torch.Tensor = moved(self.held.originals[key], self.load_device, absent.dtype, None)
        try:
            if patched:
                set_attr_param(self.model, key, value)
                _InRank.patch_weight_to_device(self, key, self.load_device)
                value = get_attr(self.model, key)
            sharding.put(name, value if cut is None else cut.of(value))
        finally:
            set_attr_param(self.model, key, absent)


class _Sliced(_Patcher):
    """Patches weights of which each rank has a slice (tensor parallelism): the whole weight from the file, as ComfyUI
    does, of which the model then gets this rank's slice."""

    def load(self, *args: Any, **kwargs: Any) -> None:
        if wrapped := self.held.cuts.keys() & self.weight_wrapper_patches.keys():
            raise RequestError(
                f"A node puts a function of its own around {min(wrapped)}, of which each device has a part; set "
                f"tensor_degree to 1."
            )
        super().load(*args, **kwargs)

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        from comfy.utils import get_attr, set_attr_param

        weight, cut = get_attr(self.model, key), self.held.cuts.get(key)
        if weight is None:
            return None  # another rank has this bias
        if cut is None or key not in self.patches:
            return super().patch_weight_to_device(key, *args, **kwargs)
        self.backup.setdefault(key, _Backup(weight, False))
        set_attr_param(self.model, key, self._whole(key, weight))
        patched = super().patch_weight_to_device(key, *args, **kwargs)
        set_attr_param(self.model, key, cut.of(get_attr(self.model, key)))
        return patched

    def patch_hook_weight_to_device(
        self,
        hooks: Any,
        combined_patches: Any,
        key: str,
        original_weights: dict[str, Any],
        memory_counter: Any,
    ) -> None:
        """Patches the whole weight with the job's LoRAs and a prompt's (hooks)."""
        from comfy.utils import get_attr, set_attr_param

        cut = self.held.cuts.get(key)
        if cut is not None:
            weight = get_attr(self.model, key)
            self.hook_backup.setdefault(key, (weight, weight.device))
            whole = self._whole(key, weight)
            original_weights[key][0] = (whole, *original_weights[key][0][1:])
            # ComfyUI writes the result into the weight, and this one may be the mapped file.
            set_attr_param(self.model, key, whole if key in self.patches else whole.clone())
            if key in self.patches:
                super().patch_weight_to_device(key)
        super().patch_hook_weight_to_device(hooks, combined_patches, key, original_weights, memory_counter)
        if cut is not None:
            set_attr_param(self.model, key, cut.of(get_attr(self.model, key)))
            if (cached := self.cached_hook_patches.get(hooks, {}).get(key)) is not None:
                self.cached_hook_patches[hooks][key] = (cut.of(cached[0]), cached[1])

    def _whole(self, key: str, part: torch.Tensor) -> nn.Parameter:
        """Returns a weight of the file like `part`, this rank's slice of it."""
        return moved(cast(nn.Parameter, self.held.originals[key]), part.device, part.dtype, None)


class _LatePatch:
    """Patches a weight each time it is used, as ComfyUI patches one: in float32, and rounded to the weight's dtype."""

    def __init__(self, patcher: Any, key: str, patches: Sequence[Any]) -> None:
        from comfy.utils import get_attr

        self._key, self._patches = key, patches
        original = patcher.held.originals.get(key)
        is_quantised = original is not None and not is_plain(original)
        self._dtype = None if is_quantised else get_attr(patcher.model, key).dtype

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        from comfy.float import stochastic_rounding
        from comfy.lora import calculate_weight
        from comfy.utils import string_to_seed

        patched: torch.Tensor = calculate_weight(self._patches, weight.float(), self._key)
        if self._dtype is not None:
            patched = stochastic_rounding(patched, self._dtype, seed=string_to_seed(self._key))
        return patched.to(weight.dtype)


class _OnWhole(list[Any]):
    """The functions of a sharded slice of a weight, as one: the first gets the file's weight with the job's patches,
    and the layer this rank's slice, `cut`, of what the last returns."""

    def __init__(self, patcher: Any, key: str, cut: Cut) -> None:
        super().__init__()
        self._original, self._cut = patcher.held.originals[key], cut
        self._patches = [_LatePatch(patcher, key, patcher.patches[key])] if key in patcher.patches else []

    def __iter__(self) -> Iterator[Any]:
        return iter((self._apply,) if self else ())

    def _apply(self, part: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = moved(self._original, part.device, None, None)
        weight = weight.to(part.dtype, copy=True) if is_plain(weight) else weight.to(part.dtype).dequantize()
        for function in (*self._patches, *super().__iter__()):
            weight = function(weight)
        return self._cut.of(weight)


def _shape_with(patches: Sequence[Any], weight: torch.Tensor, key: str) -> torch.Size:
    """Returns the shape of a weight with these patches."""
    import comfy.lora

    if not hasattr(comfy.lora, "calculate_shape"):  # ComfyUI before 0.14 has none
        return weight.shape
    return torch.Size(comfy.lora.calculate_shape(patches, weight, key))


def _functions_of(patcher: Any, key: str) -> list[Any]:
    """Returns the list of functions that a layer applies to its weight or bias each time it computes."""
    path, _, name = key.rpartition(".")
    layer = patcher.model.get_submodule(path)
    if name not in _OWNED or not hasattr(layer, "comfy_cast_weights"):
        raise RequestError(
            f"a LoRA or a merge changes {key}, which shard_weights cannot; set shard_weights to off"
        )
    found: list[Any] = getattr(layer, f"{name}_function")
    return found
