"""Mistakes that others have made with this stack, and how lcplan keeps a plan or a job from them.

``refused`` and ``warned`` traps carry the code of the error or the warning. A ``safe`` one cannot happen in a generated
job or in a plan, and a test shows so. ``tools/trap_table.py`` writes the table into the documents.
"""

from __future__ import annotations

from typing import Literal

from lcplan._record import Record

Guard = Literal["refused", "warned", "safe"]


class Trap(Record):
    """One mistake."""

    code: str
    what: str
    fix: str
    guard: Guard
    source: str


def _trap(code: str, guard: Guard, what: str, fix: str, source: str) -> Trap:
    return Trap(code=code, what=what, fix=fix, guard=guard, source=f"https://github.com/{source}")


TRAPS: tuple[Trap, ...] = (
    _trap(
        "cp-packing", "refused",
        "Packed rows under context parallelism: the mask between the samples is dropped, so they see each other.",
        "--no-packing; the generated job joins texts end to end.", "huggingface/trl/pull/6843",
    ),
    _trap(
        "sp-packing", "refused",
        "Packed rows under Ulysses with sdpa attend across their samples.",
        "--attn-implementation flash_attention_2, or --no-packing.", "huggingface/trl/pull/6843",
    ),
    _trap(
        "cp-layer-types", "refused",
        "Sliding or chunked layers under context parallelism silently become full attention.",
        "--cp-size 1, or a model whose layers all have full attention.", "huggingface/accelerate/pull/4177",
    ),
    _trap(
        "sp-layer-types", "refused",
        "Linear-attention layers under Ulysses restart their state on every rank.",
        "--sp-size 1.", "huggingface/accelerate/pull/4177",
    ),
    _trap(
        "cp-attention", "refused",
        "Context parallelism with another attention than sdpa stops at the first step, or after an upgrade.",
        "--attn-implementation sdpa.", "axolotl-ai-cloud/axolotl/issues/3173",
    ),
    _trap(
        "sp-attention", "refused",
        "Ulysses with eager attention.",
        "--attn-implementation flash_attention_2, or sdpa.", "axolotl-ai-cloud/axolotl/issues/3173",
    ),
    _trap(
        "liger-loss", "refused",
        "use_liger_kernel switches trl's chunked loss off, or is refused beside it.",
        "Leave use_liger_kernel out.", "huggingface/trl/pull/6845",
    ),
    _trap(
        "cp-with-sp", "refused",
        "cp_size and sp_size both above 1.",
        "Set one of them to 1.", "NVIDIA/Model-Optimizer/pull/1302",
    ),
    _trap(
        "sizes-do-not-multiply", "refused",
        "Parallel sizes whose product is not the number of processes.",
        "dp_shard_size takes what the other sizes leave; with cp_size 8 on 8 GPUs it is 1.",
        "NVIDIA/Model-Optimizer/pull/1302",
    ),
    _trap(
        "replicas-without-shards", "refused",
        "dp_replicate_size above 1 with dp_shard_size 1.",
        "A --dp-shard-size of at least 2, or --dp-replicate-size 1.", "NVIDIA/Model-Optimizer/pull/1302",
    ),
    _trap(
        "sp-heads", "refused",
        "An sp_size that does not divide the heads.",
        "One of the sizes that the message lists.", "huggingface/accelerate/pull/4177",
    ),
    _trap(
        "length-multiple", "refused",
        "A length that the ring cannot cut into 2 x cp_size chunks: load balancing turns itself off.",
        "The nearest multiple, which the message names.", "huggingface/trl/pull/3994",
    ),
    _trap(
        "pad-multiple", "refused",
        "pad_to_multiple_of that is no multiple of what the sequence is cut into.",
        "2 x cp_size, or sp_size; better rows that need no padding.", "huggingface/trl/pull/3994",
    ),
    _trap(
        "two-checkpointings", "refused",
        "fsdp_activation_checkpointing together with the trainer's own, which is on by default.",
        "fsdp_activation_checkpointing: false.", "huggingface/trl/pull/6845",
    ),
    _trap(
        "rope-keys", "refused",
        "rope_parameters without one of its four keys: the dict replaces the model's whole one.",
        "All four keys, or --rope auto.", "deepspeedai/DeepSpeed/pull/8345",
    ),
    _trap(
        "rope-theta", "refused",
        "A rope_theta that is not the model's.",
        "The model's own value, or none.", "deepspeedai/DeepSpeed/pull/8345",
    ),
    _trap(
        "rope-factor-too-small", "refused",
        "factor x original length is below max_length.",
        "--rope auto, or the factor that the message names.", "huggingface/transformers/issues/38224",
    ),
    _trap(
        "rope-stacked", "refused",
        "YaRN on top of a model that scales already.",
        "--rope none and a length within the model's own range.", "huggingface/transformers/issues/38224",
    ),
    _trap(
        "rope-too-short", "warned",
        "More tokens than the model has positions, without scaling: the loss starts near 10.",
        "--rope auto.", "huggingface/trl/pull/6846",
    ),
    _trap(
        "rope-set-late", "safe",
        "Rotary scaling written to the config after the model was built changes nothing.",
        "The job sets it before it builds the model.", "MakazhanAlpamys/Soup/issues/793",
    ),
    _trap(
        "first-loss", "safe",
        "A wrong rotary scaling trains on without a word.",
        "The job warns where the first loss of pretrained weights exceeds 8.", "huggingface/trl/pull/6846",
    ),
    _trap(
        "offload-by-version", "safe",
        "The version's text does not tell whether checkpointing can offload.",
        "The job asks the function's signature.", "huggingface/trl/pull/6846",
    ),
    _trap(
        "surprise-checkpoint", "safe",
        "TRL saves every 500 steps unless told not to: 12 to 16 bytes a parameter of disk each time.",
        "The job saves no checkpoint unless asked; the report says what one takes.", "huggingface/trl/pull/6846",
    ),
    _trap(
        "full-state-dict", "warned",
        "Checkpoints gathered on one rank run out of memory where training does not.",
        "SHARDED_STATE_DICT, which the generated job has.", "huggingface/accelerate/issues/3633",
    ),
    _trap(
        "every-rank-loads", "warned",
        "Every rank reads the whole model into host memory.",
        "fsdp_cpu_ram_efficient_loading: true, which the generated job has.", "modelscope/ms-swift/pull/9980",
    ),
    _trap(
        "tied-loading", "safe",
        "Tied embeddings switch loading by the main process off, or come out untied.",
        "The job's other ranks build an empty model and tie it.", "verl-project/verl/issues/7834",
    ),
    _trap(
        "tied-under-fsdp2", "safe",
        "Tied embeddings in two FSDP2 units fail from torch 2.13 on.",
        "accelerate >= 1.15, which the train extra asks for; tied weights are counted once.",
        "huggingface/accelerate/pull/4171",
    ),
    _trap(
        "root-unit", "safe",
        "Embedding and head in one unit reduce both gradients in one float32 buffer.",
        "accelerate 1.15 makes them units of their own, and their buffers are items.",
        "NVIDIA-NeMo/Automodel/pull/3708",
    ),
    _trap(
        "host-memory-unknown", "warned",
        "Pinned memory is a budget of its own beside GPU and host memory.",
        "--host-memory; the job says where it has likely run out.", "unslothai/unsloth-zoo/pull/1257",
    ),
    _trap(
        "pinned-blocks", "safe",
        "Pinned blocks are rounded up to powers of two.",
        "The host items count them so.", "wtdcode/vllm-backport/pull/67",
    ),
    _trap(
        "host-states", "safe",
        "Optimizer states on the host exhaust it.",
        "They count against --host-memory; a plan that needs more does not fit.", "OpenRLHF/OpenRLHF/issues/632",
    ),
    _trap(
        "hidden-cudnn", "warned",
        "A cuDNN in LD_LIBRARY_PATH hides the one of torch: attention is 1.6 times slower on an H100.",
        "Take it out of LD_LIBRARY_PATH.", "huggingface/transformers/pull/48163",
    ),
    _trap(
        "labels-masked", "safe",
        "A rank whose tokens all have label -100 makes the loss NaN.",
        "Every token of the job's rows has a label.", "huggingface/accelerate/pull/4177",
    ),
    _trap(
        "levers-that-exclude", "safe",
        "Adding up what two levers save that do not go together.",
        "The search prices whole plans, and the table of levers says what goes with what.",
        "modelscope/ms-swift/issues/9765",
    ),
    _trap(
        "segments", "safe",
        "Without expandable segments the same step needs up to 13% more.",
        "The job sets PYTORCH_CUDA_ALLOC_CONF.", "NVIDIA-NeMo/RL/issues/919",
    ),
    _trap(
        "mlp-tiles", "safe",
        "A tiled MLP with another number of tiles on each rank deadlocks.",
        "Between tiles the job exchanges nothing.", "deepspeedai/DeepSpeed/pull/8345",
    ),
    _trap(
        "gpus-without-length", "warned",
        "Data-parallel GPUs do not help the length of a sequence.",
        "--cp-size.", "huggingface/trl/pull/6846",
    ),
)  # fmt: skip


def table() -> str:
    """The table of codes as Markdown."""
    lines = ["| code | what goes wrong | fix | lcplan |", "|---|---|---|---|"]
    lines += [
        f"| `{trap.code}` | {trap.what} ([source]({trap.source})) | {trap.fix} | {trap.guard} |" for trap in TRAPS
    ]
    return "\n".join(lines) + "\n"
