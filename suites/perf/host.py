"""This host as the bench uses it: page cache, fingerprint, clock and canary of the real machine."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from suites.perf.arms import Host
from suites.perf.canary import cpu_canary
from suites.perf.run_record import CacheDrop, Fingerprint

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")


def drop_page_cache(
    files: tuple[Path, ...] = (),
    control: Path = DROP_CACHES,
    flush: Callable[[], None] = os.sync,
) -> CacheDrop:
    """Drop the page cache: all of it with root, else that of `files`, else say why not."""
    flush()
    try:
        control.write_text("3\n")
    except OSError as error:
        return _advise(files, f"{control}: {error.strerror}")
    return CacheDrop(True, f"wrote 3 to {control}")


def _advise(files: tuple[Path, ...], why_not: str) -> CacheDrop:
    if not files:
        return CacheDrop(False, f"not dropped: {why_not}, and no files were named")
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    return CacheDrop(True, f"posix_fadvise DONTNEED on {len(files)} files ({why_not})")


def fingerprint_here(
    device: str = "", driver: str = "", meminfo: Path = MEMINFO, cpuinfo: Path = CPUINFO
) -> Fingerprint:
    """The fingerprint of this host; `device` defaults to the processor's name."""
    return Fingerprint(
        (platform.node(),),
        platform.release(),
        driver,
        device or _processor(cpuinfo),
        os.cpu_count() or 1,
        _memory_bytes(meminfo),
    )


def _processor(cpuinfo: Path) -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ())
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def _memory_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines() if meminfo.is_file() else ():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def real_host(files: tuple[Path, ...] = ()) -> Host:
    """This machine, measured by its CPU; a GPU lane passes its own canary (see `canary.py`)."""
    return Host(time.time, time.sleep, cpu_canary, lambda: drop_page_cache(files))
