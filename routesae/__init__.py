"""Route Sparse Autoencoders: features that live across a language model's layers.

The names below are looked up in their module when they are first used, so that `import routesae` costs nothing.
"""
import os

__version__ = "0.1.0"

# Torch's threads (OpenMP's) are told to sleep while they wait, unless the user says otherwise: spinning, they would take the processor from the compiled
# kernels' threads and from other programs. It counts only if torch has not been imported before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_modules = {
    "core": "UserError tiny_lm planted_activations",
    "data": "DataConfig TokenStream batches fetch_demo",
    "activations": "load_lm middle_layers read_residual replace_residual normalize denormalize",
    "sae": "TopKSAE",
    "fast_topk": "FastTopKSAE",
    "router": "Router FixedRouter UniformRouter RouteSAE trace",
    "baselines": "ReLUSAE GatedSAE JumpReLUSAE BatchTopKSAE Crosscoder MLSAE",
    "routers": "MLPRouter AttentionRouter TopRouteSAE make_router",
    "improvements": "ImprovedTopKSAE",
    "coders": "CoderConfig make_coder save_coder load_coder",
    "training": "TrainConfig train",
    "sweep": "read_sweep",
    "finetune": "finetune_kl",
    "evaluation": "evaluate evaluate_run",
    "interop": "load_official import_official",
}
_where = {name: module for module, names in _modules.items() for name in names.split()}
__all__ = list(_where)


def __getattr__(name):
    if name not in _where:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_where[name]}"), name)


def __dir__():
    return sorted({*globals(), *_where})
