"""`vkbackend perplexity`: measure how well a model predicts a text, in windows as llama.cpp does.

A window has --ctx-size tokens, of which the second half is scored. The flag --save-all-logits saves log
probabilities. The flag --kl-divergence-base compares with saved log probabilities, for example of another
quantization. It prints the KL divergence, the change of the token's probability, and how often both models
prefer the same token.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from vkbackend.atomic_file import check_target
from vkbackend.checks import whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.models.perplexity import Base, Saving, Score, perplexity, windows
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.paths import why
from vkbackend.tools.console import console, progress_bar, write_json
from vkbackend.tools.flags.llama_cpp import add_common_arguments
from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.runner import add_model_arguments, open_models, open_runner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-f", "--file", metavar="FILE", help="the text, UTF-8")
    add(
        "-c",
        "--ctx-size",
        dest="n_ctx",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a window (default: 512)",
    )
    add("--chunks", type=int, default=-1, metavar="N", help="windows to score; -1: all (default: -1)")
    add("--save-all-logits", metavar="FILE",
        help="keep the log-probabilities of all scored tokens, 2 bytes each, as a base")  # fmt: skip
    add("--kl-divergence-base", metavar="FILE", help="compare with the log-probabilities kept in this file")
    add("--kl-divergence", action="store_true",
        help="compare, and do not save, with the file of --save-all-logits too")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of text")
    add_common_arguments(parser)
    add_model_arguments(parser, synthetic=False)


def run(args: argparse.Namespace) -> int:
    n_ctx = whole_number("n_ctx", args.n_ctx, 4, 1 << 24)
    limit = None if args.chunks == -1 else whole_number("--chunks", args.chunks, 1, 1 << 30, " or -1 for all")
    if args.file is None:
        raise InvalidArgument("no text was given; pass one with -f FILE")
    if args.kl_divergence and args.kl_divergence_base is None:
        if args.save_all_logits is None:
            raise InvalidArgument(
                "--kl-divergence compares with a file; name it with --kl-divergence-base FILE"
            )
        args.kl_divergence_base, args.save_all_logits = args.save_all_logits, None
    elif args.kl_divergence_base and not args.kl_divergence:
        note(args, "--kl-divergence-base compares; in llama.cpp it saves unless --kl-divergence is given")
    if args.save_all_logits:
        check_target(args.save_all_logits, InvalidArgument)
    if args.kl_divergence_base and not Path(args.kl_divergence_base).is_file():
        raise InvalidArgument(
            f"{args.kl_divergence_base}: no such file; make it with --save-all-logits and the other model"
        )
    with ExitStack() as stack:
        [gguf, *others] = open_models(args, stack)
        if others:
            raise InvalidArgument("perplexity takes one model (-m)")
        tokenizer = Tokenizer.from_gguf(gguf)
        tokens = tokenizer.encode(read_text(args.file))
        cut = windows(tokens, n_ctx, tokenizer.bos_id if tokenizer.add_bos else None, limit)
        n_rows = len(cut) * (n_ctx - n_ctx // 2 - 1)
        runner = open_runner(gguf, args, n_ctx=args.n_ctx)
        stack.callback(runner.close)
        base = save = None
        if args.kl_divergence_base:
            base = Base(args.kl_divergence_base, runner.n_vocab)
            if base.n_rows < n_rows:
                raise InvalidArgument(
                    f"{args.kl_divergence_base}: has {base.n_rows} scored tokens, {n_rows} are needed; "
                    "give the same --ctx-size and no more --chunks"
                )
        if args.save_all_logits:
            save = stack.enter_context(Saving(args.save_all_logits, n_rows, runner.n_vocab))
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with progress_bar(console(stderr=True), *columns) as bar:
            task = bar.add_task("windows", total=len(cut))

            def show(done: int, score: Score) -> None:
                bar.update(task, completed=done, description=f"windows, PPL {score.ppl:.4f}")

            score = perplexity(runner, cut, show, base, save)
    if args.json:
        write_json(summary(score, len(cut), n_ctx, base is not None))
    else:
        tell(score, len(cut), n_ctx, base is not None)
    return 0


def read_text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: cannot be read as UTF-8 text: {why(error)}") from None


def summary(score: Score, n_windows: int, n_ctx: int, has_base: bool) -> dict[str, Any]:
    result = {
        "ppl": score.ppl,
        "ppl_error": score.ppl_error,
        "tokens": score.n,
        "windows": n_windows,
        "n_ctx": n_ctx,
    }
    return result | (score.divergence_from_base() if has_base else {})


def tell(score: Score, n_windows: int, n_ctx: int, has_base: bool) -> None:
    write = sys.stdout.write
    write(f"{score.n} tokens scored in {n_windows} windows of {n_ctx}\n")
    write(f"Final estimate: PPL = {score.ppl:.4f} +/- {score.ppl_error:.5f}\n")
    if has_base:
        b = score.divergence_from_base()
        write(f"PPL of the base: {b['base_ppl']:.4f}\n")
        write(f"PPL / PPL of the base: {b['ppl_ratio']:.6f} +/- {b['ppl_ratio_error']:.6f}\n")
        write(f"Mean KLD: {b['mean_kld']:.6f} +/- {b['kld_error']:.6f}\n")
        write(f"Maximum KLD: {b['max_kld']:.6f}\n99.9 % KLD: {b['kld_99_9']:.6f}\n")
        write(f"Median KLD: {b['median_kld']:.6f}\n")
        write(f"RMS change of the token's probability: {100 * b['rms_dp']:.3f} %\n")
        write(f"Same top token: {100 * b['same_top']:.3f} +/- {100 * b['same_top_error']:.3f} %\n")


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["perplexity", *sys.argv[1:]]))
