"""The studio reads and writes schedules as the library does, text and CSV, and refuses what no schedule is, soon."""

import random

import pytest
from schedule_vectors import broken, packed, registry

from dualpipe_lab import Program
from dualpipe_lab.pp import from_torch_csv, to_torch_csv
from dualpipe_lab.pp.lowering import lower, strip
from dualpipe_lab.pp.validation.validator import InvalidProgram

pytestmark = pytest.mark.browser

READ_ALL = """([kind, texts]) => texts.map(text => { try {
  return programText(kind === "csv" ? readCsv(text, "name") : parseProgram(text, "name"));
} catch (error) { return error.message; } })"""
LETTERS = "0123 \t\n\r,;()FBIWSEND_RCVOLAP#:\"'rank\x1c\x85\xa0\u2028\ufeffé\\"


def texts():
    """Texts of valid and of broken programs, lowered or not, and each with some letters changed."""
    rng = random.Random(7)
    programs = [*registry((1, 3, 4), (2, 4, 6)), *broken(150, seed=8)]
    for program in programs:
        yield str(program)
        yield program.rows()
        yield spoiled(rng, str(program))
    for program in registry((2, 4), (4,)):
        yield str(lower(program))
    yield from (
        "",
        "\n# only a comment\n",
        "rank 1: 0F0",
        "rank 007: 0F0",
        "rank 0 : 0F0 0B0\x85rank\t1:1F0",
        [" rank 0:"],
    )
    yield from (
        "0F0 00007B0001",
        "é",
        "0F0 a\"b'c\\",
        "0F0 \u200b1F0",
        "0F0\u30001B0 x\x07y",
        "(0F1;0B1)OVERLAP_F_Bx",
        "0F0F",
    )


def spoiled(rng, text):
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(LETTERS) + text[at + rng.randint(0, 1) :]
    return text


def said(read, text):
    try:
        return str(strip(read(text)))
    except ValueError as error:
        return str(error)


def test_texts_are_read_as_the_library_reads_them(core):
    cases = list(texts())
    expected = [said(lambda text: Program.parse("name", text), text) for text in cases]
    assert sum("is not an action" in text for text in expected) > 40
    assert core.evaluate(READ_ALL, ["text", cases]) == expected


def test_csv_is_read_as_the_library_reads_it(core):
    rng = random.Random(9)
    cases = ["\n".join(",".join(row.split()) for row in program.rows()) for program in broken(150, seed=10)]
    cases += [to_torch_csv(p, form) for p in registry((2, 3), (4,)) if is_torch(p) for form in FORMS]
    cases += [spoiled(rng, text) for text in cases if text]
    cases += [
        '"0F0",0B0\r1F0,"1\nB0"',
        '0F0,"0B0\n',
        "\ufeff0F0, ( 0F1 ; 0B0 ) OVERLAP_F_B,,0B1\r\n\r\n",
        '0F0,"a""b"',
        "",
    ]
    cases += ["0F0,3REDUCE_GRAD,2UNSHARD,0B0", "0F0," + "x" * 140_000, '"0F0"x,0B0']
    expected = [said(lambda text: from_torch_csv(text, name="name", check=False), text) for text in cases]
    found = core.evaluate(READ_ALL, ["csv", cases])
    for case, one, other in zip(cases, found, expected, strict=True):
        assert one == other, case[:200]


FORMS = ("compute_only", "compute_comms")


def is_torch(program):
    try:
        return bool(to_torch_csv(program))
    except ValueError:
        return False


@pytest.mark.parametrize("form", [*FORMS, "csv"])
def test_csv_is_written_as_the_library_writes_it(core, form):
    pairs = Program.parse("split pairs", ["0F0 (0F1;0I0)OVERLAP_F_B 0W0 0B1"])
    programs = [*registry(microbatches=(1, 4, 6)), *broken(300, seed=11), pairs]
    expected = []
    for program in programs:
        try:
            expected.append(to_torch_csv(program, form))
        except (ValueError, InvalidProgram) as error:
            expected.append(str(error))
    write = """packed => packed.map(({ name, rows, ...counts }) => {
      const program = makeProgram(name, parseProgram(rows, name).ranks, counts);
      try { return writeCsv(program, counts.form); } catch (error) { return error.message; } })"""
    if form not in FORMS:
        assert set(expected) == {"there is no CSV form 'csv'; use 'compute_only' or 'compute_comms'"}
        assert core.evaluate(write, [packed(pairs, form=form)]) == expected[:1]
        return
    assert sum(text.startswith("torch keeps a stage on one rank") for text in expected) > 5
    assert expected[-1].startswith("torch overlaps a forward with a whole backward only, not (0F1;0I0)OVERLAP_F_B")
    assert core.evaluate(write, [packed(program, form=form) for program in programs]) == expected


def test_a_header_gives_the_name_and_messages_leave_a_note(core):
    found = core.evaluate(
        "text => { const { name, notes } = parseProgram(text); return [name, notes]; }",
        "# my: own: 1 ranks, 1 stages, 1 microbatches\nrank 0: 0F0 0SEND_F0 0RECV_B0 0B0",
    )
    assert found == ["my: own", ["2 sends and receives are left out: the page places the messages itself"]]


HOSTILE = {
    "'0F0 '.repeat(2_500_000)": "the text has 10000000 characters; the studio reads at most 4000000",
    "'x'.repeat(3_999_999)": "rank 0, position 0: '" + "x" * 100 + "...' is not an action",
    "' '.repeat(3_999_990) + 'x'": "rank 0, position 0: 'x' is not an action",
    "'\\n'.repeat(3_999_900) + '<img src=x onerror=alert(1)>'": "rank 0, position 0: '<img' is not an action",
    "'0F0 '.repeat(900_000)": "it has more than 262144 steps; use fewer ranks or microbatches",
    "'0F0\\n'.repeat(900_000)": "it has more than 1024 ranks, the most that the studio reads",
    "'0F0 12345678901234567890B0'": "rank 0, position 1: the index 12345678901234567890 has 20 digits; number stages",
    "'rank 12345678901234567890: 0F0'": "row 0 is labelled rank 12345678901234567890; list the rows in rank order",
    "'rank ' + '1'.repeat(9_999) + ': 0F0'": "row 0 is labelled rank 1111",
    "'(0F0;'.repeat(700_000)": "rank 0, position 0: '(0F0;(0F0;",
    "'0F0,' + ' '.repeat(2_000_000) + 'x'": "rank 0, position 0: '0F0,' is not an action",
    "'0F0,\"' + 'x, '.repeat(1_000_000)": "rank 0, position 0: '0F0,\"x,' is not an action",
}


def test_hostile_texts_are_refused_in_a_second_with_a_sentence(core):
    script = """() => [%s].map(make => { const text = make(), start = performance.now();
      const tell = read => { try { return read(text).name; } catch (error) { return error.message; } };
      const said = tell(parseProgram); tell(readCsv);
      return [said, performance.now() - start]; })"""
    found = core.evaluate(script % ",".join(f"() => {make}" for make in HOSTILE))
    for (text, took), words in zip(found, HOSTILE.values(), strict=True):
        assert text.startswith(words)
        assert len(text) < 500
        assert took < 4000  # a loaded machine; each takes less than a fifth of a second of processor time


def test_the_verdict_on_huge_indexes_and_many_kinds_of_cells_is_soon(core):
    token = "`${i * 7_000_000_000}F${(i * 6_000_000_007) % 9e14}`"
    rows = f"[Array.from({{ length: 100_000 }}, (_, i) => {token}).join(' ')]"
    text, took = core.evaluate(f"""() => {{ const start = performance.now(), {{ text }} = check(parseProgram({rows}));
      return [text, performance.now() - start]; }}""")
    assert "stages run from 0 to 699993000000000, but no rank runs 1;" in text
    assert text.splitlines()[-1] == "  - and 199994 more"
    assert took < 8000
