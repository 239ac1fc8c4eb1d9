"""One rank of `flare run` from the meeting to its end: package, cache, weights, service."""

from __future__ import annotations

import os
from collections.abc import Sequence

from engine.cli.console import Journal
from engine.cli.run_options import RunOptions, api_key, floor_of
from engine.distribution import distribute, receive_own
from engine.errors import PeerLostError
from engine.hostmem import read_host_memory
from engine.ir import Graph
from engine.mapping import digests_over_ranks
from engine.meeting import Meeting
from engine.model import build_graphs
from engine.package import Package, check_graphs, open_package
from engine.package_format import PackageHeader
from engine.server import ServeOptions, Service
from engine.start import HostTerms, agree_on_pages, host_id, plan_cache


def run_rank(
    options: RunOptions, header: PackageHeader | None, meeting: Meeting, journal: Journal
) -> None:
    """Bring one rank up and keep it running until it is told to end."""
    if options.rank == 0:
        assert header is not None, "rank 0 has its package"
        distribute(options.directory, header, meeting, journal.progress)
    else:
        receive_own(options.directory, meeting, journal.progress, needs=header is None)
    from engine.core import LeadCore, follow
    from engine.mesh import build_mesh
    from engine.residence import build_rank, fold_of, rank_map_of

    journal.enter("communication")
    mesh = build_mesh(meeting)
    package = open_package(
        options.directory,
        options.rank,
        verify=not options.unverified,
        on_read=True,
        progress=journal.part("verify"),
    )
    with package:
        graphs = own_graphs(package)
        fixed_bytes = rank_map_of(package).fixed_bytes
        pages = cache_pages(options, package, meeting, journal, fixed_bytes)
        journal.enter("load", fixed_mib=fixed_bytes // 2**20)
        threads = options.threads or int(os.environ["OMP_NUM_THREADS"])
        model = build_rank(package, graphs, pages, mesh, threads, journal.progress)
        if options.rank:
            journal.enter("follow")
            follow(model, mesh)
            return
        core = LeadCore(model, mesh, fold_of(package))
        try:
            journal.enter("warm up")
            core.warm_up()
            serve_core(options, core, package, meeting, journal)
        finally:
            core.close()


def own_graphs(package: Package) -> Sequence[Graph]:
    """This rank's graphs, after a look that the package was made for the same ones."""
    manifest = package.manifest
    of_all = [
        build_graphs(manifest.config, manifest.recipe, manifest.deals, rank)
        for rank in range(manifest.recipe.ranks)
    ]
    check_graphs(package, digests_over_ranks(of_all))
    return of_all[package.rank]


def cache_pages(
    options: RunOptions,
    package: Package,
    meeting: Meeting,
    journal: Journal,
    fixed_bytes: int,
) -> int:
    """Size the KV cache with all ranks, and say how."""
    manifest = package.manifest
    journal.enter("cache")
    available = read_host_memory().available_bytes
    own = HostTerms(options.rank, available, fixed_bytes, host_id())
    pages, found = agree_on_pages(
        meeting,
        own,
        lambda terms: plan_cache(
            terms,
            floor_of(options, package.header),
            manifest.memory_map["kv"],
            manifest.config,
            manifest.recipe,
            options.limit_bytes(),
        ),
    )
    if found is not None:
        found.log(journal.log)
    return pages


def serve_core(
    options: RunOptions, core, package: Package, meeting: Meeting, journal: Journal
) -> None:
    """Answer HTTP until told to stop or a rank is gone; then raise PeerLostError."""
    directory = options.directory
    tokenizer, chat = directory / "tokenizer.json", directory / "chat_format.json"
    service = Service(
        core,
        package.manifest.config,
        package.manifest.recipe,
        host=options.host,
        port=options.port,
        model_name=options.model_name or directory.resolve().name,
        tokenizer_path=tokenizer if tokenizer.exists() else None,
        options=ServeOptions(
            scheduler_policy=options.scheduler_policy,
            draft_tokens=options.mtp_draft_tokens,
            package_hash=package.package_hash,
            prefix_cache_memory_bytes=options.prefix_cache_memory,
            prefix_cache_disk=options.prefix_cache_disk,
            prefix_cache_disk_limit_bytes=options.prefix_cache_disk_limit,
            chat_format=chat if chat.exists() else None,
            api_key=api_key(options.api_key_file),
            drain_seconds_max=options.drain_s,
        ),
    )

    def gone(error: PeerLostError) -> None:
        journal.log("a rank is gone", reason=str(error))
        service.stop()

    meeting.on_lost(gone)
    journal.enter("serve")

    def ready(url: str) -> None:
        journal.log("ready", url=url, tokens=core.pages * core.page_tokens)
        print(f"ready {url}", flush=True)

    service.run(ready)
    meeting.check()
