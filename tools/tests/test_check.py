"""Does `make check` run every fast test once, whatever folder it stands in?"""

from pathlib import Path

from tools import check, sizes


def runs(words: tuple[str, ...], file: Path) -> bool:
    """Whether pytest collects the file when it is given these folders and --ignore options."""
    asked = [Path(word) for word in words if not word.startswith("--ignore=")]
    ignored = [Path(word.removeprefix("--ignore=")) for word in words if word.startswith("--ignore=")]
    return any(file.is_relative_to(folder) for folder in asked) and not any(map(file.is_relative_to, ignored))


def test_every_test_file_is_in_exactly_one_run() -> None:
    """Also one in a folder that is new."""
    files = [path.relative_to(check.ROOT) for path in sizes.sources() if path.name.startswith("test_")]
    files.append(Path("services/new/tests/test_new.py"))

    for file in files:
        assert 1 == sum(runs(words, file) for words in (*check.RUNS.values(), check.OTHERS)), file
