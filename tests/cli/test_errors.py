"""Errors of the command line: one line, an exit code, and nothing written."""

from shell import run

ERRORS = [
    (["show", "gpip"], 1, "there is no schedule named 'gpip'; use one of gpipe, 1f1b"),
    (["show", "dualpipe", "--ranks", "3"], 1, "dualpipe needs an even number of ranks, got 3"),
    (["show", "gpipe", "--virtual-stages", "3"], 1, "gpipe has no option virtual_stages; it has none"),
    (["show", "interleaved", "--chunks", "3"], 1, "interleaved has no option chunks; it has num_virtual_stages, rou"),
    (["show", "interleaved", "--virtual-stages", "0"], 1, "interleaved needs num_virtual_stages to be an integer of"),
    (["show", "gpipe", "--verbose"], 1, "--verbose needs a value, and it is no option of this command"),
    (["show", "gpipe", "1f1b"], 1, "show takes one schedule, got 2: gpipe 1f1b; use compare for several"),
    (["show", "gpipe", "--cost", "F=x"], 1, "--cost: 'x' in 'F=x' is not a number; write 2, 2.5 or 5/2"),
    (["show", "gpipe", "--cost", "F=1/0"], 1, "--cost: '1/0' in 'F=1/0' is not a number"),
    (["show", "gpipe", "--cost", "G=1"], 1, "--cost: 'G=1' is not a cost; write F, I, W, B, FB, latency, transfer"),
    (["show", "gpipe", "--cost", "F=1,F=2"], 1, "--cost names F twice"),
    (["show", "gpipe", "--cost", "F=-1"], 1, "Cost.F must not be negative, got -1"),
    (["show", "dualpipe", "--csv", "x.csv"], 1, "torch keeps a stage on one rank, but 'DualPipe' has stage"),
    (["show", "missing.csv"], 1, "missing.csv: No such file or directory"),
    (["show", "gpipe", "--svg", "missing/x.svg"], 1, "missing/x.svg: No such file or directory"),
    (["compare", "gpipe", "--virtual-stages", "3"], 1, "none of these schedules has the option --virtual-stages"),
    (["compare", "interleaved:3"], 1, "'interleaved:3': '3' is not option=value"),
    (["compare", "dualpipe", "--ranks", "3"], 1, "none of these schedules has this size"),
    (["explain", "gpipe", "1f1b"], 1, "explain takes one schedule, got 2: gpipe 1f1b"),
    (["compare", "--memory", "0"], 2, "Invalid value for '--memory'"),
    (["explain", "missing.csv"], 1, "missing.csv: No such file or directory"),
    (["convert", "missing", "there", "--to", "published"], 1, "missing holds no weights that can be converted"),
    (
        ["convert", "missing", "there", "--to", "onnx"],
        1,
        "there is no form 'onnx' of weights; use one of published, checkpoint",
    ),
    (["convert", "missing", "there"], 2, "Missing option '--to'"),
    (
        ["plan", "llama3-70b", "--gpus", "4", "--global-batch", "16"],
        1,
        "no plan of llama3-70b on 4 GPUs fits into",
    ),
    (["plan", "lama3-8b", "--gpus", "4"], 1, "the nearest known model is llama3-8b"),
    (["show"], 2, "Missing argument"),
    (["show", "gpipe", "--ranks", "x"], 2, "Invalid value for '--ranks'"),
    (["show", "gpipe", "--ranks", "0"], 2, "Invalid value for '--ranks'"),
    (["shw"], 2, "No such command 'shw'. Did you mean 'show'?"),
    (["grade", "missing"], 1, "missing"),
]


def test_errors_are_one_line_without_a_traceback(tmp_path, monkeypatch, subtests):
    for words, code, message in ERRORS:
        with subtests.test(words=words, code=code, message=message):
            monkeypatch.chdir(tmp_path)
            result = run(*words)
            assert result.exit_code == code
            assert result.stderr.startswith("error: ")
            assert message in result.stderr
            assert result.stderr.count("\n") == 1
            assert not list(tmp_path.iterdir())


def test_an_invalid_file_is_one_line_in_show_and_everything_in_explain(tmp_path):
    file = tmp_path / "broken.csv"
    file.write_text("0F0,0F1,0B0,0B0,0B1\n1F0,1F1,1B0\n")
    result = run("show", file)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "0B0 runs again" in result.stderr
    assert "(and 1 more)" in result.stderr
    result = run("explain", file)
    assert result.exit_code == 1
    assert "0B0 runs again" in result.stdout
    assert "stage 1, microbatch 1: F without a backward" in result.stdout


def test_a_typo_in_a_file_is_named(tmp_path):
    (tmp_path / "typo.csv").write_text("0F0,0X0\n")
    for command in ("show", "compare", "explain"):
        result = run(command, tmp_path / "typo.csv")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: row 1 (rank 0), cell 2: '0X0' is not an action")
