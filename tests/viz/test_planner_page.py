"""The planner's page computes what Python computes: bytes to the last one, seconds to the last digits of a double."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from math import isclose

import pytest

from dualpipe_lab import models, schedules
from dualpipe_lab.plan import MEGATRON, MEGATRON_TIME, estimate, step_time
from dualpipe_lab.plan.accelerators import CLUSTERS
from dualpipe_lab.plan.kept_experts import ExpertTable
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.viz import bundle, planner_page
from dualpipe_lab.viz.planner_page import CHOICES, NUMBERS, START, PlannerPage, planned

MODELS = list(planner_page.models())
SPARSE = [name for name, config in planner_page.models().items() if not isinstance(config, models.LlamaConfig)]
STATES = ("parameters", "gradients", "masters", "moments")
NUMBERS_OF_PAGE = "planner_numbers.mjs"
PARTS = ("layers", "ends", "logits", "working", "received")


def drawn_choices(number, most_gpus, seed, **fixed):
    """Choices of all controls, half of them of powers of two; most of them legal."""
    draw = random.Random(seed)
    found = []
    while len(found) < number:
        values = CHOICES | {name: marks for name, (marks, _) in NUMBERS.items()}
        if draw.random() < 0.5:
            values |= ODD
        choice = {name: draw.choice(several) for name, several in values.items()}
        choice |= {"model": draw.choice(MODELS), "gpu": draw.choice(list(planner_page.gpus())), **fixed}
        if choice["model"] not in SPARSE and draw.random() < 0.95:
            choice |= {"ep": 1, "overlap": False}
        if choice["overlap"] and draw.random() < 0.8:
            choice["schedule"] = draw.choice(["dualpipe", "dualpipev", "paired_1f1b", "paired_interleaved"])
        used = choice["tp"] * choice["cp"] * choice["pp"]
        dp_size = draw.choice([1, 2, 3, 4, 8, 9, 16, 64]) * (choice["ep"] if draw.random() < 0.5 else 1)
        choice["gpus"] = used * dp_size
        choice["batch"] = dp_size * choice["rows"] * draw.choice([1, 2, 3, 8, 13, 32])
        if choice["gpus"] % choice["node"] and draw.random() < 0.9:
            choice["node"] = draw.choice([size for size in range(1, 129) if choice["gpus"] % size == 0])
        if choice["gpus"] <= most_gpus:
            found.append(choice)
    return found


ODD = {  # numbers that are no powers of two
    "slower": (1, 3), "sequence": (4800, 6144, 7680, 9999, 46080), "rows": (1, 3, 5), "tp": (1, 2, 3, 5, 8, 16, 24, 40),
    "cp": (1, 3, 5, 6), "pp": (1, 3, 5, 6, 7, 10), "node": (3, 4, 6, 12, 16, 36, 72),
}  # fmt: skip


def rows_of(program):
    return [" ".join(str(step).removesuffix("OVERLAP_F_B") for step in row) for row in program.ranks]


def python_of(choice):
    """The library's model, plan, cluster, memory and seconds, or its refusal."""
    try:
        config, plan, cluster = planned(choice)
        plan.check(config, choice["sequence"], choice["gpus"])
        memory = estimate(config, plan, cluster, choice["sequence"], choice["batch"], MEGATRON)
        step = step_time(config, plan, cluster, choice["sequence"], choice["batch"], MEGATRON_TIME)
    except ValueError as refusal:
        return str(refusal)
    return config, plan, memory, step


def compare_memory(found, config, plan, memory, choice):
    """The page has the first rank of tp, whose shards are the largest; the ranks of cp are equal."""
    assert found["layers"] == list(map(len, plan.stage_layers(config))), choice
    for rank, one in enumerate(found["memory"]):
        for place in (memory.places[rank, cp, 0] for cp in range(plan.cp)):
            own = [*(getattr(place.states, name) for name in STATES), *(getattr(place.peak, name) for name in PARTS)]
            own += [place.buffers, place.allocated, place.total.num_bytes, place.total.least, place.total.most]
            names = (*STATES, *PARTS, "buffers", "allocated", "total", "least", "most")
            assert [one[name] for name in names] == own, (choice, rank)
            assert one["action"] == place.peak.action or plan.pp == 1, (choice, rank)
    most = max(one["allocated"] for one in found["memory"])
    assert isclose(most, memory.largest.allocated, rel_tol=1e-5), choice  # another rank of tp may have more padding


def compare_seconds(found, step, choice):
    pairs = {"seconds": step.seconds, "pipeline": step.pipeline, "bubble": step.bubble, "mfu": step.mfu}
    pairs |= {"fullMfu": step.full_mfu, "tokensPerSecond": step.tokens_per_second}
    for name, value in pairs.items():
        assert isclose(found[name], value, rel_tol=1e-12, abs_tol=1e-13), (name, found[name], value, choice)


def test_memory_and_seconds_equal_the_library(node, amount):
    choices = drawn_choices(amount(400, 48), 4096, seed=24)
    legal = 0
    for choice, found in zip(choices, node([planner_page.facts(), *choices], NUMBERS_OF_PAGE)[1:], strict=True):
        expected = python_of(choice)
        assert ("problem" in found) == isinstance(expected, str), (choice, found.get("problem"), expected)
        if "problem" not in found:
            legal += 1
            compare(found, expected, choice)
    assert len(choices) / 3 < legal < len(choices)


def compare(found, expected, choice):
    config, plan, memory, step = expected
    if plan.program is not None:
        assert found["rows"] == rows_of(plan.program), choice
    compare_memory(found, config, plan, memory, choice)
    compare_seconds(found["step"], step, choice)


def overlapped_choices(number, seed, **fixed):
    """Plans with overlapped experts, most of them legal."""
    draw = random.Random(seed)
    for _ in range(number):
        choice = {name: draw.choice(several) for name, several in OVERLAPPED.items()}
        dp_size = choice["ep"] * draw.choice([1, 3])
        choice["gpus"] = choice["tp"] * choice["cp"] * choice["pp"] * dp_size
        choice["node"] = draw.choice([1, choice["tp"] * choice["cp"] * choice["pp"], choice["gpus"]])
        choice["batch"] = dp_size * choice["rows"] * 2 * choice["pp"] * draw.choice([1, 2, 3])
        yield START | choice | {"overlap": True} | fixed


OVERLAPPED = {
    "model": SPARSE, "gpu": ("h100", "b200"), "sequence": (1536, 4608, 7680), "rows": (1, 2, 3), "tp": (1, 2, 4),
    "cp": (1, 2, 3), "pp": (2, 4, 6), "ep": (2, 4, 8), "zero": (0, 1, 2, 3),
    "schedule": ("dualpipe", "dualpipev", "paired_1f1b", "paired_interleaved", "paired_zero_bubble_h1"),
}  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_overlapped_experts_equal_the_library(node, amount, recompute):
    choices = list(overlapped_choices(amount(300, 28), 25, recompute=recompute))
    peaks = Counter()
    for choice, found in zip(choices, node([planner_page.facts(), *choices], NUMBERS_OF_PAGE)[1:], strict=True):
        expected = python_of(choice)
        assert ("problem" in found) == isinstance(expected, str), (choice, found.get("problem"), expected)
        if "problem" not in found:
            compare(found, expected, choice)
            peaks[max(found["memory"], key=lambda one: one["allocated"])["action"][1]] += 1
    assert sum(peaks.values()) > len(choices) / 2  # others have fewer experts than ranks
    assert peaks["B"]
    assert peaks["F"]


def test_programs_equal_the_library_on_a_grid(node):
    expected = {}
    for name in CHOICES["schedule"]:
        for pp in range(2, 9):
            for count in (*range(1, 2 * pp + 3), 4 * pp, 4 * pp + 2):
                with suppress(ValueError):  # sizes that the schedule refuses
                    expected[name, pp, count] = rows_of(schedules.build(name, pp, count))
    assert len({name for name, _, _ in expected}) == 15
    (found,) = node([{"programs": [list(sizes) for sizes in expected]}], NUMBERS_OF_PAGE)
    for sizes, rows in zip(expected, found, strict=True):
        assert rows == expected[sizes], sizes


IDLE = [  # at whose peak a stage keeps the activations of no microbatch, so that its received inputs count
    {"model": "llama3-405b", "gpu": "h200", "gpus": 16, "sequence": 2048, "batch": 32, "tp": 4, "pp": 4},
    {"model": "qwen3-8b", "gpus": 512, "sequence": 2048, "batch": 2, "rows": 2, "tp": 2, "cp": 16, "pp": 16, "zero": 3,
     "recompute": True},
    {"model": "qwen3-8b", "gpu": "b200", "gpus": 64, "sequence": 16384, "batch": 32, "rows": 2, "tp": 2, "cp": 4,
     "pp": 4, "recompute": True},
]  # fmt: skip


def test_memory_equals_the_library_s_where_a_stage_is_idle_at_the_peak(node):
    choices = [START | {"schedule": "interleaved"} | choice for choice in IDLE]
    for choice, found in zip(choices, node([planner_page.facts(), *choices], NUMBERS_OF_PAGE)[1:], strict=True):
        config, plan, memory, _ = python_of(choice)
        assert any(place.peak.received for place in memory.places.values())
        compare_memory(found, config, plan, memory, choice)


def test_a_tied_model_on_one_stage_is_one_unit_of_zero(node):
    choice = START | {"model": "llama3.2-1b", "gpus": 4, "pp": 1, "zero": 3, "sequence": 2048, "batch": 4}
    (found,) = node([planner_page.facts(), choice], NUMBERS_OF_PAGE)[1:]
    compare(found, python_of(choice), choice)


def test_every_model_has_the_library_s_layers_on_every_number_of_stages(node, amount):
    sizes = [{"gpus": pp, "node": pp, "pp": pp} for pp in range(1, 17, amount(1, 3))]
    choices = [START | {"model": model} | one for model in MODELS for one in sizes]
    choices += [one | {"schedule": "interleaved"} for one in choices]
    for choice, found in zip(choices, node([planner_page.facts(), *choices], NUMBERS_OF_PAGE)[1:], strict=True):
        config, plan, _ = planned(choice)
        if "problem" in found:
            assert plan.num_stages > config.num_layers
        else:
            assert found["layers"] == list(map(len, plan.stage_layers(config)))


# tp, cp, pp, dp, what else; most of them on several nodes of 8
SENDING = [
    ("llama3.2-1b", 1, 1, 2, 8, {"zero": 1}),  # a table on two stages
    ("llama3.2-3b", 2, 1, 2, 1, {}),
    ("llama3.2-1b", 1, 1, 1, 4, {"zero": 3, "schedule": "1f1b"}),
    ("llama3.2-3b", 8, 1, 2, 1, {"schedule": "interleaved", "recompute": True}),
    ("llama3-8b", 2, 4, 1, 2, {"zero": 2, "recompute": True}),
    ("qwen3-8b", 4, 2, 2, 1, {"zero": 3, "schedule": "interleaved"}),
    ("qwen3-14b", 1, 2, 4, 2, {"zero": 2, "schedule": "zero_bubble_h1"}),
    ("llama3-70b", 1, 1, 16, 1, {"schedule": "gpipe"}),
    ("qwen3-32b", 2, 1, 1, 1, {}),
    ("llama3.2-1b", 1, 1, 1, 1, {}),
    ("llama3-8b", 2, 3, 2, 1, {"sequence": 6144, "node": 4}),  # groups that begin and end within nodes
    ("qwen3-8b", 16, 1, 1, 3, {"zero": 1, "node": 12}),  # two ranks of tp with the same key heads
    ("qwen3-14b", 40, 1, 1, 2, {"sequence": 10240, "node": 16, "zero": 2}),  # shards of the vocabulary of two sizes
    ("llama3.2-1b", 4, 1, 3, 3, {"node": 18, "zero": 3}),
    ("llama3.2-1b", 1, 1, 4, 2, {"schedule": "dualpipe", "zero": 2, "node": 4, "batch": 16}),  # copies of stages
    ("llama3.2-3b", 2, 1, 2, 3, {"schedule": "dualpipe", "zero": 3, "node": 4, "batch": 12}),
    ("llama3-8b", 1, 1, 6, 1, {"schedule": "easy_dualpipe", "node": 3}),
    ("llama3.2-1b", 1, 2, 2, 2, {"schedule": "dualpipev", "zero": 1, "batch": 8}),
    ("llama3.2-3b", 1, 1, 3, 2, {"schedule": "zbv", "zero": 3, "node": 2}),
    ("qwen3-8b", 1, 1, 4, 1, {"schedule": "v_half"}),
    ("qwen3-8b", 2, 1, 2, 1, {"schedule": "paired_interleaved", "recompute": True}),
    ("llama3.2-1b", 1, 1, 1, 5, {"node": 1}),  # every link of the norm's ring, whose chunks differ, leaves a node
    ("mixtral-8x7b", 2, 1, 2, 4, {"ep": 4, "zero": 1, "recompute": True}),
    ("mixtral-8x7b", 1, 3, 1, 4, {"ep": 2, "zero": 3, "sequence": 1542, "node": 6, "batch": 4}),  # rows do not divide
    ("mixtral-8x7b", 1, 1, 4, 6, {"ep": 2, "zero": 2, "schedule": "dualpipe", "batch": 48}),  # some mirrors on a node
    ("qwen3-30b-a3b", 8, 1, 1, 2, {"ep": 2, "zero": 2}),
    ("qwen3-30b-a3b", 1, 1, 4, 2, {"ep": 2, "zero": 3, "schedule": "zero_bubble_h1", "batch": 16}),
    ("qwen3-30b-a3b", 1, 1, 2, 4, {"ep": 4, "zero": 3, "schedule": "zbv", "batch": 16, "node": 4}),
    ("qwen3-30b-a3b", 1, 1, 2, 2, {"zero": 3, "schedule": "v_half", "batch": 16}),  # a W of stage 0 without its I
    ("mixtral-8x7b", 1, 1, 1, 6, {"node": 2}),  # loads that no group of 6 divides, of which every second link counts
    ("deepseek-v3", 2, 2, 2, 2, {"ep": 4, "zero": 0}),
    ("deepseek-v3", 1, 1, 4, 4, {"ep": 2, "zero": 2, "schedule": "dualpipe", "batch": 32, "overlap": True}),
    ("qwen3-30b-a3b", 1, 1, 2, 2, {"schedule": "dualpipev", "batch": 8, "overlap": True, "recompute": True, "ep": 2}),
    ("deepseek-v3", 2, 1, 2, 4, {"ep": 4, "zero": 3, "schedule": "dualpipe", "batch": 16, "overlap": True, "node": 8}),
    ("mixtral-8x7b", 1, 1, 2, 2, {"ep": 2, "zero": 3, "schedule": "paired_1f1b", "batch": 12, "overlap": True}),
]


@pytest.mark.parametrize("case", SENDING, ids=lambda case: "-".join(map(str, case[:5])))
def test_bytes_of_every_link_equal_the_library(node, case):
    model, tp, cp, pp, dp, more = case
    choice = (
        START
        | {"zero": 0, "model": model, "tp": tp, "cp": cp, "pp": pp, "gpus": tp * cp * pp * dp, "batch": 2 * dp}
        | more
    )
    (found,) = node([planner_page.facts(), choice], NUMBERS_OF_PAGE)[1:]
    compare_traffic(found["traffic"], choice)


def compare_traffic(found, choice):
    config, plan, _ = planned(choice)
    traffic = plan.traffic(config, choice["batch"], choice["sequence"])
    layers, node_size = traffic.parts["layers"], min(choice["node"], plan.world_size)
    ring = [layers.sent("isend"), layers.between_nodes(node_size, "isend")]
    rows = [layers.sent("all_to_all_single"), layers.between_nodes(node_size, "all_to_all_single")]
    names = {"pp": "pipeline", "gradients": "gradients", "norm": "norm", "routers": "routers"}
    expected = {
        axis: [traffic.parts[name].sent(), traffic.parts[name].between_nodes(node_size)] for axis, name in names.items()
    }
    along_tp = [layers.sent() - ring[0] - rows[0], layers.between_nodes(node_size) - ring[1] - rows[1]]
    expected |= {"cp": ring, "ep": rows, "tp": along_tp}
    assert found == {axis: [str(sent - far), str(far)] for axis, (sent, far) in expected.items()}


# sizes that no known model has
SMALL = models.V3MoEConfig(
    vocabulary_size=512, hidden_size=256, num_layers=8, num_dense_layers=4, num_heads=4, ffn_size=64, num_experts=16,
    num_experts_per_token=1, num_groups=1, num_groups_per_token=1, balance=0.0, normalise=False,
    latent=LatentSizes(query_rank=48, kv_rank=64, content=16, position=8, value=12),
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """A model of small sizes on accelerators whose kernels take a while to start."""
    unit, *rest = CLUSTERS["h100"]
    monkeypatch.setitem(CLUSTERS, "h100", (replace(unit, overhead=5e-6), *rest))
    monkeypatch.setattr(planner_page, "models", lambda: {"small": SMALL})
    return START | {"model": "small", "pp": 1, "sequence": 1536, "recompute": True}


@pytest.mark.parametrize(("tp_size", "is_latent"), [(2, True), (4, False)])
def test_latents_travel_along_cp_where_they_are_shorter_than_keys_and_values(node, small, tp_size, is_latent):
    assert SMALL.latent.is_shorter(SMALL.num_heads // tp_size) is is_latent
    choice = small | {"tp": tp_size, "cp": 3, "gpus": 6 * tp_size, "node": 3 * tp_size, "batch": 4}
    (found,) = node([planner_page.facts(), choice], NUMBERS_OF_PAGE)[1:]
    compare(found, python_of(choice), choice)
    compare_traffic(found["traffic"], choice)


@pytest.mark.parametrize("schedule", ["dualpipe", "paired_1f1b"])
def test_overlapped_layers_may_take_most_in_attention_and_dense_ones_lie_on_two_stages(node, small, schedule):
    """Here buckets are larger than stages, and still no bucket has weights of two copies."""
    choice = small | {"pp": 4, "gpus": 8, "ep": 2, "batch": 32, "schedule": schedule, "overlap": True, "zero": 2}
    (found,) = node([planner_page.facts(), choice], NUMBERS_OF_PAGE)[1:]
    config, plan, *_ = expected = python_of(choice)
    assert plan.stage_layers(config)[1][0] < SMALL.num_dense_layers
    compare(found, expected, choice)
    compare_traffic(found["traffic"], choice)
    table = ExpertTable(config, plan, MEGATRON, 1, 1536)
    assert table.working_bytes > table.backward_bytes
    peaks = [one["working"] for one in found["memory"]]
    assert (table.working_bytes in peaks) is (schedule == "paired_1f1b"), peaks  # a dense layer of the rank takes more


def test_features_of_experts_that_do_not_divide_along_tp_are_refused(node, small, monkeypatch):
    odd = replace(SMALL, expert_ffn_size=30)
    monkeypatch.setattr(planner_page, "models", lambda: {"small": odd})
    choice = small | {"tp": 4}
    (found,) = node([planner_page.facts(), choice], NUMBERS_OF_PAGE)[1:]
    assert found["problem"] == "the 30 features of an expert do not divide among 4 ranks of tp; use another tp"
    assert isinstance(python_of(choice), str)


def test_the_planner_s_script_is_light():
    assert len(bundle.element_script("planner").encode()) < 120_000


def test_a_start_that_the_page_does_not_offer_is_refused():
    with pytest.raises(ValueError, match="the page has no control 'hybrid'; it has model, gpu, gpus, node"):
        PlannerPage(hybrid=True)
    with pytest.raises(ValueError, match=r"model is one of llama3-8b, .* got 'gpt3-175b'"):
        PlannerPage(model="gpt3-175b")
    with pytest.raises(ValueError, match=r"gpus is a whole number from 1 to 131072, got 8\.5"):
        PlannerPage(gpus=8.5)
    with pytest.raises(ValueError, match="the page computes 16384 passes of microbatches through stages, got 16392"):
        PlannerPage(batch=2049)
    with pytest.raises(ValueError, match="pp x cp x tp are 64 ranks, and there are 8 GPUs"):
        PlannerPage(tp=8)
    with pytest.raises(ValueError, match=r"a step's sequences divide among 8 data ranks x 1 microbatches, got 4"):
        PlannerPage(pp=1, zero=3, batch=4)


def test_without_scripts_there_are_the_figures_of_the_first_plan():
    html = PlannerPage().to_html(script=False)
    assert "<td>0</td><td>25.2</td><td>63.0</td><td>70.6</td>" in html
    assert len(html) < 8_000
