"""The quotas of downloads, by what a key has downloaded before."""

from __future__ import annotations

import pytest

from leasehold.domain.errors import TooMany
from leasehold.limits.downloads import GB, QUOTAS, RATES, _check_windows, _Window


def windows(downloaded: int) -> dict[int, _Window]:
    requests = int(bool(downloaded))
    return {seconds: _Window(requests, downloaded, 60.0 * requests) for _, seconds in (*RATES, *QUOTAS)}


def test_a_result_that_is_larger_than_a_quota_can_be_downloaded_alone() -> None:
    _check_windows(windows(0), size=7 * GB)
    with pytest.raises(TooMany) as refused:
        _check_windows(windows(1), size=7 * GB)
    assert refused.value.code == "download_quota_exceeded"
    assert refused.value.retry_after == 60.0


@pytest.mark.parametrize(("downloaded", "size"), [(GB - 1, 1), (1, GB - 1)])
def test_a_download_that_fits_is_allowed_and_one_byte_more_is_not(downloaded: int, size: int) -> None:
    _check_windows(windows(downloaded), size)
    with pytest.raises(TooMany):
        _check_windows(windows(downloaded), size + 1)
