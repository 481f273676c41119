from sparsesam.lab.data import download_bar


def test_draws_a_bar_per_file(capsys):
    with download_bar() as bar:
        bar("one.bin", 500_000, 1_000_000)
        bar("two.bin", 10, None)
        bar("one.bin", 1_000_000, 1_000_000)
    shown = capsys.readouterr().out
    assert "one.bin" in shown
    assert "two.bin" in shown


def test_draws_nothing_when_nothing_is_downloaded(capsys):
    with download_bar():
        pass
    assert not capsys.readouterr().out.strip()
