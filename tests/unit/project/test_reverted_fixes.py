"""Can the fixes of benchmarks/reverted_fixes.toml still be undone, and are their tests there?"""

from benchmarks import reverted_fixes


def test_every_fix_of_the_list_is_in_one_place_of_the_sources() -> None:
    fixes = reverted_fixes.read_fixes()
    assert len(fixes) == len({fix.replace for fix in fixes}) == 39
    moved = []
    for fix in fixes:
        try:
            reverted_fixes.file_of(fix)
        except ValueError as error:
            moved.append(str(error))
        files = [word for word in fix.asks if word.startswith("tests/")]
        moved += [
            f"{fix.name}: there is no {f}" for f in files if not (reverted_fixes.ROOT / f).exists()
        ]
    assert moved == []
