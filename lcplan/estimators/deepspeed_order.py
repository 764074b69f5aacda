"""What DeepSpeed's own bookkeeping decides: which parameters share a bucket, a partition, or stay gathered.

Plain functions over the parameters in model order, read in deepspeed 0.19.8 (``runtime/zero``) and held against the
order of events of a run: names are those of the modules, with the layer's index before them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lcplan.model_spec import ModelSpec
from lcplan.units import ceil_div

REDUCE_BUCKET = 500_000_000
"""Elements of gradients that are reduced together: deepspeed 0.19.8 runtime/zero/config.py reduce_bucket_size."""
PREFETCH_BUCKET = 50_000_000
"""Elements gathered ahead of their use: deepspeed 0.19.8 runtime/zero/config.py stage3_prefetch_bucket_size."""
PERSISTENCE_THRESHOLD = 100_000
"""Parameters up to this many elements stay gathered: runtime/zero/config.py stage3_param_persistence_threshold."""
MAX_LIVE = 1_000_000_000
"""Gathered elements beyond which nothing is prefetched: runtime/zero/config.py stage3_max_live_parameters."""
MAX_REUSE_DISTANCE = 1_000_000_000
"""Elements within which a coming use keeps a parameter gathered: runtime/zero/config.py stage3_max_reuse_distance."""
SUB_GROUP = 1_000_000_000
"""Elements of shards that stage 3 updates at once: deepspeed 0.19.8 runtime/zero/config.py sub_group_size."""
PARTITION_ALIGNMENT = 2
"""Elements that a partition of stages 1 and 2 is aligned to: stage_1_and_2.py nccl_start_alignment_factor."""
EMBEDDING, FINAL_NORM, HEAD = "embed_tokens", "norm", "lm_head"
END = ""
"""Name of the moment after the last gradient."""
_WRAPPERS = ("layer", "self_attn", "mlp", "act_fn")
"""Modules of a layer without parameters of their own: they prefetch too."""
_FORWARD = (
    "input_layernorm", "self_attn", "q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj",
    "post_attention_layernorm", "mlp", "gate_proj", "act_fn", "up_proj",
)  # fmt: skip
"""Modules of a layer in the order of the forward, up to down_proj."""
_BACKWARD = (
    "up_proj", "act_fn", "gate_proj", "post_attention_layernorm", "self_attn", "o_proj", "v_bias", "v_proj", "k_norm",
    "k_bias", "k_proj", "q_norm", "q_bias", "q_proj", "input_layernorm",
)  # fmt: skip
"""Modules of a layer, and biases, in the order of the backward, from down_proj on."""


@dataclass(frozen=True)
class Parameter:
    """One parameter tensor."""

    numel: int
    decays: bool
    """Weight decay applies: the optimizer has two groups, each with partitions of its own."""


def parameters(spec: ModelSpec) -> dict[str, Parameter]:
    """Every parameter in model order, the order of ``named_parameters``."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    layer = {
        "q_proj": query * hidden, "k_proj": key * hidden, "v_proj": key * hidden, "o_proj": hidden * query,
        "gate_proj": inner * hidden, "up_proj": inner * hidden, "down_proj": hidden * inner,
    }  # fmt: skip
    small = {"q_norm": spec.head_dim, "k_norm": spec.head_dim} if spec.qk_norm == "head" else {}
    small |= {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    others = spec.layers[0].total - sum(layer.values()) - sum(small.values())
    if others == query + 2 * key:
        small |= {"q_bias": query, "k_bias": key, "v_bias": key}  # Qwen2
    table = Parameter(spec.vocab_size * hidden, decays=True)
    found = {EMBEDDING: table}
    for index in range(spec.num_hidden_layers):
        found |= {f"{index}.{name}": Parameter(numel, decays=True) for name, numel in layer.items()}
        found |= {f"{index}.{name}": Parameter(numel, decays=False) for name, numel in small.items()}
    found[FINAL_NORM] = Parameter(hidden, decays=False)
    return found if spec.tie_word_embeddings else found | {HEAD: table}


def arrivals(names: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Names in the order in which the backward completes their gradients; a tied head arrives with the embedding."""
    present = set(names)
    order = [HEAD, FINAL_NORM]
    for index in reversed(range(num_layers)):
        order += [f"{index}.{name}" for name in ("down_proj", *_BACKWARD)]
    return tuple(name for name in (*order, EMBEDDING) if name in present)


# Buckets of gradients


@dataclass(frozen=True)
class Arrival:
    """One gradient is complete, and may push out those that were in the bucket before it."""

    name: str
    """``END`` for the reduction of what is left."""
    waiting: int
    """Elements of a gradient above the bucket's size, which keeps its own memory until it is reduced here."""
    reduced: tuple[str, ...]
    """Gradients that are reduced before this one joins the bucket."""


def fill_buckets(order: Sequence[str], sizes: Mapping[str, Parameter]) -> tuple[Arrival, ...]:
    """The bucket's contents as gradients arrive in ``order``, and the final reduction."""
    found: list[Arrival] = []
    inside: list[str] = []
    elements = 0
    for name in order:
        numel = sizes[name].numel
        waiting = elements if elements > REDUCE_BUCKET else 0
        if inside and elements + numel > REDUCE_BUCKET:
            found.append(Arrival(name, waiting, tuple(inside)))
            inside, elements = [], 0
        else:
            found.append(Arrival(name, waiting, ()))
        inside.append(name)
        elements += numel
    return (*found, Arrival(END, elements if elements > REDUCE_BUCKET else 0, tuple(inside)))


# Partitions of stages 1 and 2


def partition_size(sizes: Mapping[str, Parameter], ranks: int, *, decays: bool) -> int:
    """Elements of one rank's partition of one optimizer group, padding included."""
    total = sum(parameter.numel for parameter in sizes.values() if parameter.decays == decays)
    return ceil_div(total, PARTITION_ALIGNMENT * ranks) * PARTITION_ALIGNMENT


def shard_size(sizes: Mapping[str, Parameter], ranks: int, *, decays: bool) -> int:
    """Elements of one rank's shards of one optimizer group: stage 3 cuts every parameter by itself."""
    return sum(ceil_div(parameter.numel, ranks) for parameter in sizes.values() if parameter.decays == decays)


def pieces(sizes: Mapping[str, Parameter], ranks: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """For each parameter the (rank, elements) of the partitions it lies in, in order."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for decays in (True, False):
        each, offset = partition_size(sizes, ranks, decays=decays), 0
        for name, parameter in sizes.items():
            if parameter.decays != decays:
                continue
            end, cut = offset + parameter.numel, []
            while offset < end:
                rank = offset // each
                taken = min(end, (rank + 1) * each) - offset
                cut.append((rank, taken))
                offset += taken
            found[name] = tuple(cut)
    return found


def reduction_copy(reduced: Iterable[str], owners: Mapping[str, tuple[tuple[int, int], ...]]) -> int:
    """Elements of the largest flat copy that the all-reduce of a bucket makes (stages 1 and 2).

    Neighbouring pieces of one rank are one slice; slices are flattened together until they exceed the bucket's size,
    and a slice alone is not copied.
    """
    slices: list[list[int]] = []
    for name in reduced:
        for rank, numel in owners[name]:
            if slices and slices[-1][0] == rank:
                slices[-1][1] += numel
            else:
                slices.append([rank, numel])
    largest, together, count = 0, 0, 0
    for _, numel in slices:
        together, count = together + numel, count + 1
        if count > 1:
            largest = max(largest, together)
        if together > REDUCE_BUCKET:
            together, count = 0, 0
    return largest


def sub_groups(sizes: Mapping[str, Parameter], ranks: int) -> tuple[tuple[int, int], ...]:
    """Elements and number of the shards that stage 3 updates together, in order."""
    found: list[tuple[int, int]] = []
    for decays in (True, False):
        shards = [ceil_div(p.numel, ranks) for p in sizes.values() if p.decays == decays]
        whole = sum(shards) <= SUB_GROUP
        elements, count = 0, 0
        for position, numel in enumerate(shards):
            elements, count = elements + numel, count + 1
            if position == len(shards) - 1 or (not whole and elements >= SUB_GROUP):
                found.append((elements, count))
                elements, count = 0, 0
    return tuple(found)


# Parameters that stage 3 keeps gathered


@dataclass
class _Gather:
    """One all-gather in flight or done: its flat buffer is there until the last of its parameters was used."""

    waiting: set[str]
    flat: int
    done: bool = False


@dataclass
class _Coordinator:
    """The parameter coordinator over one step, counting gathered elements."""

    sizes: Mapping[str, Parameter]
    ranks: int
    trace: list[tuple[str, tuple[str, ...]]]
    """Module and parameters of every fetch of the step, in order."""
    live: int = 0
    counted: int = 0
    """DeepSpeed's own count of gathered elements."""
    step: int = 0
    held: dict[str, int] = field(default_factory=dict)
    flying: dict[str, _Gather] = field(default_factory=dict)
    active: dict[str, set[str]] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = deque((name, at) for at, (_, names) in enumerate(self.trace) for name in names)
        self.uses: dict[str, list[int]] = {}
        self.before = [0]
        for at, (_, names) in enumerate(self.trace):
            for name in names:
                self.uses.setdefault(name, []).append(at)
            self.before.append(self.before[-1] + sum(self.sizes[name].numel for name in names))

    def _persists(self, name: str) -> bool:
        return self.sizes[name].numel <= PERSISTENCE_THRESHOLD

    def _absent(self, name: str) -> bool:
        return not self._persists(name) and name not in self.held and name not in self.flying

    def _gather(self, names: list[str]) -> None:
        padded = {name: ceil_div(self.sizes[name].numel, self.ranks) * self.ranks for name in names}
        self.counted += sum(self.sizes[name].numel for name in names)
        if len(names) == 1:
            self.held |= padded
        together = _Gather(set(names), sum(padded.values()) if len(names) > 1 else 0)
        self.live += sum(padded.values())
        self.flying |= dict.fromkeys(names, together)

    def _wait(self, name: str) -> None:
        gather = self.flying.pop(name)
        if gather.flat and not gather.done:
            for one in gather.waiting:
                self.held[one] = self.sizes[one].numel
                self.live += self.sizes[one].numel
            gather.done = True
        gather.waiting.discard(name)
        if not gather.waiting:
            self.live -= gather.flat

    def fetch(self) -> None:
        """Gather what the next module needs, and prefetch what follows."""
        module, names = self.trace[self.step]
        if missing := [name for name in names if self._absent(name)]:
            self._gather(missing)
        for name in names:
            self.active.setdefault(name, set()).add(module)
            if name in self.flying:
                self._wait(name)
        new = {name for name in names if self.latest.get(name, -1) < self.step}
        seen: set[str] = set()
        while len(seen) < len(new):
            name, at = self.queue.popleft()
            self.latest[name] = at
            seen.add(name)
        room = min(MAX_LIVE - self.counted, PREFETCH_BUCKET)
        ahead: list[str] = []
        elements = 0
        while self.queue and elements < room:
            name, at = self.queue.popleft()
            self.latest[name] = max(self.latest.get(name, -1), at)
            if self._absent(name) and name not in ahead:
                ahead.append(name)
                elements += self.sizes[name].numel
        if ahead:
            self._gather(ahead)
        self.step += 1

    def release(self, module: str, names: tuple[str, ...]) -> None:
        """Give back what the module used, unless it is used again soon."""
        for name in names:
            self.active[name].discard(module)
            if name not in self.held or self.active[name] or self.latest[name] > self.step:
                continue
            uses = self.uses[name]
            following = bisect_left(uses, self.step)
            near = following < len(uses) and (
                self.before[uses[following]] - self.before[self.step] < MAX_REUSE_DISTANCE
            )
            if not near:
                self.live -= self.held.pop(name)
                self.counted -= self.sizes[name].numel


Event = tuple[str, str, tuple[str, ...]]
"""What happens ("fetch", "release" or "moment"), the module or the moment's name, and its parameters."""


def _events(sizes: Mapping[str, Parameter], num_layers: int) -> list[Event]:
    """A step with every layer checkpointed; the model itself uses the head, which is no module of its own there."""
    head = (HEAD if HEAD in sizes else EMBEDDING,)
    events: list[Event] = []

    def fetch(name: str) -> tuple[str, ...]:
        own = (name,) if name in sizes else ()
        if own or name.rpartition(".")[2] in _WRAPPERS:
            events.append(("fetch", name, own))
        return own

    def forward(*names: str) -> None:
        for name in names:
            if own := fetch(name):
                events.append(("release", name, own))

    def backward(name: str) -> None:
        if name.endswith("_bias"):  # of the module that follows, and small enough to stay
            events.append(("moment", name, ()))
        elif own := fetch(name):
            events.extend([("moment", name, ()), ("release", name, own)])

    events += [("fetch", "model", head), ("fetch", "decoder", ())]
    forward(EMBEDDING)
    events.append(("fetch", "rotary_emb", ()))
    for index in range(num_layers):
        forward(f"{index}.layer", *(f"{index}.{name}" for name in _FORWARD))
        events.append(("moment", f"forward.{index}", ()))
        forward(f"{index}.down_proj")
    forward(FINAL_NORM)
    events += [("release", "model", head), ("moment", "loss", ()), ("fetch", "model", head)]
    if HEAD in sizes:
        events.append(("moment", HEAD, ()))
    events.append(("fetch", "decoder", ()))
    backward(FINAL_NORM)
    for index in reversed(range(num_layers)):
        down = f"{index}.down_proj"
        forward(f"{index}.layer", f"{index}.mlp")
        fetch(down)
        forward(*(f"{index}.{name}" for name in _FORWARD))
        backward(down)  # fetched a second time, where the recomputation stops
        events.append(("moment", f"mlp.{index}", ()))
        for name in _BACKWARD:
            backward(f"{index}.{name}")
            if name == "o_proj":
                events.append(("moment", f"attention.{index}", ()))
    fetch(EMBEDDING)
    return [*events, ("moment", EMBEDDING, ()), ("moment", END, ())]


def gathered(sizes: Mapping[str, Parameter], num_layers: int, ranks: int) -> dict[str, int]:
    """Elements that are gathered at each moment of a step under stage 3, beside the small ones that always are.

    Moments are the arrival of each gradient (by name), ``forward.i`` (before down_proj), ``loss``, ``mlp.i`` (after
    down_proj's backward) and ``attention.i`` (after o_proj's).
    """
    events = _events(sizes, num_layers)
    coordinator = _Coordinator(sizes, ranks, [(module, names) for kind, module, names in events if kind == "fetch"])
    found: dict[str, int] = {}
    for kind, module, names in events:
        if kind == "fetch":
            coordinator.fetch()
        elif kind == "release":
            coordinator.release(module, names)
        else:
            found[module] = coordinator.live
    return found
