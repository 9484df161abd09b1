"""What a machine without the packages that build a cluster is told, or given."""

import pytest
from tests.cluster import packages
from tests.cluster.errors import ClusterError


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lacks debootstrap."""
    monkeypatch.setattr(packages, "_FOUND_BY", {"debootstrap": ("no-such-program",), "coreutils": ("/",)})


@pytest.mark.usefixtures("bare")
def test_without_root_the_missing_packages_are_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"apt-get install .*debootstrap.* as root") as caught:
        packages.need(print)
    assert "coreutils" not in str(caught.value)


@pytest.mark.usefixtures("bare")
def test_root_gets_them_installed_and_hears_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    steps: list[list[str]] = []
    said: list[str] = []

    def install(argv: list[str], **_: object) -> None:
        steps.append(argv)
        monkeypatch.setattr(packages, "_FOUND_BY", {})

    monkeypatch.setenv("WEIGHTSYNC_CACHE", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(
        "shutil.which", lambda name, path=None: "/usr/bin/apt-get" if name == "apt-get" else None
    )
    monkeypatch.setattr(
        "tests.cluster.cache.run", lambda argv, **rest: install(argv, **rest) if "install" in argv else None
    )
    packages.need(said.append)
    assert steps == [["apt-get", "install", "--yes", "--no-install-recommends", "debootstrap"]]
    assert said == ["installing Debian packages: debootstrap"]
