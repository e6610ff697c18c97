"""Checks of what the gateway knows: prompts, block sizes, the index and its streams, the pool."""

from collections.abc import Iterator
from typing import Any

from gateway.cli.finding import Finding
from gateway.cli.worker_checks import served
from gateway.knowledge.drains import STAYS_CLOSED
from gateway.prompts.parity import shown

_INDEX_FIX = (
    "compare with series and mismatches of /admin/v1/audit; it counts in full once answers agree again"
)


def check_prompts(models: list[dict[str, Any]]) -> Iterator[Finding]:
    """Token by token, as the gateway itself compared them with what workers render."""
    for view in models:
        model = view["model"]
        check = f"prompts of {model}"
        for found in view["differences"]:
            ours = shown(found["ours"], found["our_text"])
            theirs = shown(found["theirs"], found["their_text"])
            detail = f"{found['api']}: token {found['position']} is {ours}, on {found['worker']} {theirs}"
            fix = f'[models."{model}"] tokenizer must be the worker\'s own; until then workers render them'
            yield Finding(check, "fail", detail, fix)
        if view["made"] == "nowhere":
            fix = (
                f'set tokenizer in [models."{model}"] to one this machine can load, or prompt.source to auto'
            )
            yield Finding(check, "fail", f"not known: {view['why']}", fix)
        elif view["made"] != "here":
            yield Finding(check, "skip", f"made {view['made']}: {view['why']}".rstrip(": "))
        elif not view["differences"]:
            agreed = ", ".join(sorted(view["agreed"]))
            yield Finding(
                check, "ok", f"made here; workers render the same tokens: {agreed or 'none asked yet'}"
            )


def check_block_sizes(workers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Workers of one model must cut blocks alike, or they can't share the pool."""
    sizes: dict[str, dict[str, int]] = {}
    for worker in workers:
        for model in served(worker):
            sizes.setdefault(model["id"], {})[worker["name"]] = worker["block_size"]
    for model, by_worker in sizes.items():
        check = f"block size of {model}"
        if not all(by_worker.values()):
            silent = ", ".join(name for name, size in by_worker.items() if not size)
            yield Finding(check, "fail", f"not reported by {silent}", f'set block_size in [models."{model}"]')
        elif len(set(by_worker.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in by_worker.items())
            yield Finding(check, "fail", f"differs: {listed}", "start all workers with the same --block-size")
        else:
            yield Finding(check, "ok", f"{next(iter(by_worker.values()))} tokens")


def check_index(targets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Iterator[Finding]:
    up = _targets_up(workers)
    for target in targets:
        name = target["target"]
        if name not in up:
            continue
        events, hashes = f"KV events of {name}", f"hashes of {name}"
        if target["stream"] == "exact":
            yield Finding(events, "ok", f"{target['batches']} batches, {target['gaps']} gaps")
        elif target["stream"] == "none":
            fix = "start the worker with --kv-events-config; `moongate worker --dry-run` prints it"
            yield Finding(events, "fail", "none are published", fix)
        else:
            detail = f"{target['stream']}, {target['gaps']} gaps, {target['garbage']} undecodable"
            detail += f"; {target['why']}" if target["why"] else ""
            yield Finding(events, "fail", detail, "is the publisher's port reachable from the gateway?")
        if target["stream"] == "exact" and target["why"]:
            yield Finding(f"index of {name}", "fail", target["why"], _INDEX_FIX)
        if target["hash_mismatch"]:
            fix = "set hash_algo and hash_seed of the model to what the worker uses"
            yield Finding(hashes, "fail", target["hash_mismatch"], fix)
        elif any(target["blocks"].values()):
            yield Finding(hashes, "ok", "the worker's block hashes are those the gateway computes")
        else:
            yield Finding(
                hashes, "skip", "no block has been announced yet; send a turn of a few blocks first"
            )


def check_windows(targets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Models of which some layers see a sliding window only, or remember in another way."""
    entries = {target["target"]: target for target in targets}
    for worker in workers:
        for entry in [entries[t["name"]] for t in worker["targets"] if t["name"] in entries][:1]:
            check, needs = f"sliding windows of {worker['name']}", entry["windows"].values()
            if entry["unproven_groups"]:
                detail = f"KV groups {entry['unproven_groups']} hit in a way that is not known: no credit"
                yield Finding(f"KV groups of {worker['name']}", "warn", detail)
            if not needs:
                continue
            step = max(needs) * worker["block_size"]
            if worker["retention"] == 0:
                detail = (
                    "kept only where a prompt ends: prompts that share a beginning, and answers that a "
                    "conversation goes on from, are computed anew"
                )
                fix = f"start the worker with --prefix-cache-retention-interval {step}"
                yield Finding(check, "warn", detail, fix)
            elif worker["retention"] is None or worker["retention"] <= step:
                yield Finding(check, "ok", "all of them are kept")
            else:
                detail = f"kept every {worker['retention']} tokens: what prompts share hits up to there"
                yield Finding(check, "ok", detail)


def check_pool(
    pool: dict[str, Any], targets: list[dict[str, Any]], workers: list[dict[str, Any]]
) -> Iterator[Finding]:
    if not pool["configured"]:
        yield Finding("pool", "skip", "not configured (mooncake.master)")
        return
    if pool["degraded"]:
        details = pool["details"]
        detail = f"the master at {pool['master']} can't be asked ({details['reason']})"
        detail += f"; its admin HTTP was tried at {', '.join(details['places'])}"
        fix = "is the master up, and mooncake.http_port the port of its admin HTTP (its --metrics_port)?"
        yield Finding("pool", "fail", detail, fix)
        return
    yield Finding("pool", "ok", f"the master at {pool['master']} answers")
    yield from _closed_segments(pool, workers)
    details = pool["details"]
    if details["turns"] and not details["announced"]:
        yield _pool_events(_silent(targets, workers))
    yield from _master_events(details)
    for layout in details["layouts"]:
        check = f"pool keys of {layout['name']}"
        if layout["found"]:
            ranks = [f"{layout[f'{kind}_ranks']} {kind}" for kind in ("tp", "pp", "pcp", "dcp")]
            groups = ", ".join(map(str, layout["groups"]))
            yield Finding(check, "ok", f"found; ranks: {', '.join(ranks)}; KV groups: {groups}")
        elif layout["missed"]:
            fix = "cache_prefix of the model must be that of the workers' kv_connector_extra_config"
            yield Finding(check, "fail", "workers announced blocks, but none is there by this name", fix)
        else:
            yield Finding(check, "skip", "no turn has found a block yet")


def _closed_segments(pool: dict[str, Any], workers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Workers in service whose share of the pool is closed since they were drained."""
    closed = {part["name"] for part in pool["details"]["segments"] if part["status"] == "DRAINED"}
    for worker in workers:
        own, drain = worker["segment"], worker["drain"]
        if drain is None and any(own and own in (name, name.rpartition(":")[0]) for name in closed):
            detail = f"{STAYS_CLOSED}: what the worker computes goes to others' memory"
            fix = "start its process anew (cordon it first)"
            yield Finding(f"pool segment of {worker['name']}", "warn", detail, fix)


def _pool_events(silent: list[str]) -> Finding:
    """Why no worker has said that it stored a block; silent: those that publish nothing."""
    check, detail = "pool events", "no worker has said since this gateway started that it stored a block"
    if silent:
        fix = f"start {', '.join(silent)} with --kv-events-config"
        return Finding(check, "warn", f"{detail}: what is new there is found by asking alone", fix)
    detail += ": nothing to do where nothing new was stored; through MultiConnector vLLM never says"
    return Finding(check, "skip", detail)


def _master_events(details: dict[str, Any]) -> Iterator[Finding]:
    check, events = "the master's events", details["events"]
    if events is None and details["master_events"]:
        fix = "set mooncake.events to its kv_events_bind_endpoint, and turns need not ask"
        yield Finding(check, "warn", "published and not followed", fix)
    elif events is not None and events["state"] == "following":
        yield Finding(check, "ok", f"followed at {events['endpoint']}")
    elif events is not None:
        why = events["why"] or "not connected"
        fix = "is mooncake.events the master's kv_events_bind_endpoint, and kv_events_emit_object_key on?"
        yield Finding(check, "warn", f"not relied on: {why}", fix)


def _silent(targets: list[dict[str, Any]], workers: list[dict[str, Any]]) -> list[str]:
    """Targets of workers that are up and publish no KV events."""
    up = _targets_up(workers)
    return [each["target"] for each in targets if each["stream"] == "none" and each["target"] in up]


def _targets_up(workers: list[dict[str, Any]]) -> set[str]:
    return {target["name"] for worker in workers if worker["state"] == "up" for target in worker["targets"]}
