"""The first page of the report: sentences that say what the figures mean for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vkbackend.figures import short
from vkbackend.meta.known_ways import ONE_CALL
from vkbackend.meta.learned_times import WRONG, is_wrong
from vkbackend.meta.measured_ways import BETTER, TOKEN_NBYTES
from vkbackend.meta.options import AHEAD
from vkbackend.runtime import SIGNALS
from vkbackend.tools.report.driver_quirks import kept, quirks
from vkbackend.tools.report.part import Row

Parts = Mapping[str, Sequence[Row]]  # part -> its rows; "device" contains the names of a row's devices
SPLIT_S = 0.05  # A rate that differs by less than this share may differ by noise.


def sentences(parts: Parts) -> list[str]:
    rates = [row for row in parts.get("rates", ()) if row.get("depth") == 0 and row.get("tg t/s")]
    reduces = parts.get("reduces", ())
    lines = list(_alone(rates)) + list(_together(rates))
    lines += list(_exchanges(reduces)) + list(_host_memory(parts.get("host-memory", ())))
    for devices in dict.fromkeys(row["device"] for row in reduces):
        of_pair = [row for row in reduces if row["device"] == devices]
        lines += [*filter(None, [kept(of_pair)]), *quirks(of_pair)]
    lines += list(_wrong(rates))
    return lines or ["No part with speeds was finished."]


def _models(rates: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f"{row['model']}" for row in rates))


def _alone(rates: Sequence[Row]) -> Iterator[str]:
    for row in rates:
        if "+" in row["device"]:
            continue
        line = (
            f"{row['device']} alone generates {short(row['tg t/s'])} tokens/s with {row['model']}"
            f"{_layers(row)}, and computes prompts at {short(row['pp t/s'])} tokens/s."
        )
        if kept := row.get("% of t/s in segments"):
            line += f" A step in segments, as two devices need, reaches {kept:.0f} % of this rate."
        yield line


def _layers(row: Row) -> str:
    return "" if row["layers"] == "all" else f" ({row['layers']} layers)"


def _together(rates: Sequence[Row]) -> Iterator[str]:
    """For each model, compare all devices together with the fastest single device, if both ran the same
    number of layers."""
    for model in _models(rates):
        of_model = [row for row in rates if row["model"] == model]
        groups = [row for row in of_model if "+" in row["device"]]
        for group in groups:
            single = [r for r in of_model if "+" not in r["device"] and r["layers"] == group["layers"]]
            if not single:
                yield f"{group['device']} run {model}, and no device runs it alone."
                continue
            best = max(single, key=lambda row: float(row["tg t/s"]))
            yield _compared(model, group, best)


def _compared(model: str, group: Row, best: Row) -> str:
    times, token_us = group["tg t/s"] / best["tg t/s"], 1e6 / group["tg t/s"]
    line = (
        f"With {model}, {group['device']} together are {times:.2f} times as fast as {best['device']} alone."
    )
    exchanges, exchange_ms = group.get("exchanges"), group.get("exchange ms")
    allowed = 0.0
    if exchanges and exchange_ms:
        spent_us = min(1e3 * exchange_ms, token_us)
        line += f" The {exchanges} exchanges of a token take about {spent_us:.0f} of {token_us:.0f} us."
        allowed = (1e6 / best["tg t/s"] - (token_us - spent_us)) / exchanges
    if times > 1 + SPLIT_S:
        return f"{line} Use both."
    advice = f"Use {best['device']} alone for models that fit it, and all devices for larger ones."
    if allowed > 0:
        advice += f" Together they would be faster if an exchange took less than {allowed:.0f} us."
    elif exchanges:
        advice += " Even exchanges that take no time would not make them faster."
    return f"{line} {advice}"


def _exchanges(rows: Sequence[Row]) -> Iterator[str]:
    for devices in dict.fromkeys(row["device"] for row in rows):
        of_pair = [r for r in rows if r["device"] == devices and r["bytes"] == TOKEN_NBYTES]
        of_pair = [row for row in of_pair if row["sums"] == "exact"]
        usual = [row for row in of_pair if (row["provider"], row["signal"], row["ahead"]) == _usual(of_pair)]
        if not usual:
            continue
        fastest, us = min(of_pair, key=lambda row: float(row["us"])), usual[0]["us"]
        line = f"An exchange of 16 KiB between {devices} takes {us:.0f} us by default."
        if fastest["us"] < BETTER * us:
            ahead = "in one call" if fastest["ahead"] == ONE_CALL else f"{fastest['ahead']} ahead"
            way = f"{fastest['provider']}, {fastest['signal']}, {ahead}"
            indices = devices.replace("Vulkan", "").replace(" + ", ",")
            line += (
                f" The fastest way takes {fastest['us']:.0f} us ({way}). "
                f"`vkbackend tune --exchanges -dev {indices}` measures all ways and keeps the fastest."
            )
        else:
            line += " No other way is clearly faster."
        yield line


def _usual(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Return the provider, signal and number of submissions ahead that vkbackend uses by default. The
    provider is "pages" if the devices can import pages."""
    providers = {row["provider"] for row in rows}
    return ("pages" if "pages" in providers else "host-sum", SIGNALS[0], str(AHEAD))


def _host_memory(rows: Sequence[Row]) -> Iterator[str]:
    for devices in dict.fromkeys(row["device"] for row in rows if "copy GB/s" in row):
        best = max((r for r in rows if r["device"] == devices), key=lambda row: float(row["read GB/s"] or 0))
        yield (
            f"Shaders of {devices} read pinned host memory ({best['memory']}) at {short(best['read GB/s'])} "
            f"GB/s, and copies move it at {short(best['copy GB/s'])} GB/s."
        )


def _wrong(rates: Sequence[Row]) -> Iterator[str]:
    for row in rates:
        predicted, measured = row.get("predicted t/s"), row["tg t/s"]
        if predicted and is_wrong(predicted, measured):
            yield (
                f"The prediction for {row['model']} on {row['device']} is wrong by more than "
                f"{100 * WRONG:.0f} %: {short(predicted)} tokens/s predicted, {short(measured)} measured."
            )
