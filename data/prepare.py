#!/usr/bin/env python3
"""Makes token files for training from chats, prompts with answers, pairs of answers, or text, with a Hugging Face tokenizer.

A text is rendered once and tokenised once. A token is a target if it lies wholly inside a trained span: an assistant message and its
end-of-turn token, the completion, or the whole text. The first token of a document is never a target: no token precedes it."""

import argparse
import itertools
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from typing import NamedTuple

missing = [name for name in ("numpy", "tokenizers", "transformers", "jinja2", "xxhash") if find_spec(name) is None]
if missing:
    sys.exit(f"prepare.py: Python has no {', '.join(missing)}\n  fix: make deps (or: pip install -r requirements.txt)")

import numpy as np

from cache_key import cache_key
from chat import SENTINEL, ChatTemplate, ending, mark_targets
from documents import DRAFTS, columns_of, label_of, margin_of
from errors import DataError, GeneralError
from json_yaml import read_object
from limits import Place, refuse_late
from options import build_parser, snake_case, trainers_names
from program import run
from records import Record, check_inputs, read_records, total_size
from shards import check_prefix, write_shards
from sources import source_of
from token_file import TokenFile
from tokenizer import Ids, Tokenizer, fnv1a
from whole_file import refuse_other_file
from worker import end_with_parent

FORMAT_VERSION = "1"


# ---- documents


class Lot(NamedTuple):
    """The concatenated documents of a group of records."""

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    margins: np.ndarray  # one for each pair, NaN if the pair has none
    labels: np.ndarray  # of unpaired: for each document 1 if its answer is desirable, else 0
    columns: list  # of rl: for each document a JSON object for reward functions
    ends: set  # the special tokens that ended trained turns
    longest: int  # tokens of a document that exceeds max_len
    usual_ends: list  # if there is none: the special token that the chat template puts after an answer
    counts: Counter
    size: int  # bytes of the records in their source


class Recipe:
    """Converts records to documents. Each worker process has a copy of the parent's object, made by fork."""

    def __init__(self, task, options, tokenizer):
        self.draft = DRAFTS[task]
        self.longest = 0
        self.has_targets = task not in ("prompts", "rl")
        self.is_pref = task == "pref"
        self.is_unpaired = task == "unpaired"
        self.has_columns = task == "rl"
        self.options = options
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.hf, "--tokenizer_chat_template" if options.tokenizer_chat_template else options.tokenizer)
        self.adds_bos = {"auto": tokenizer.adds_bos, "always": True, "never": False}[options.add_bos]
        self.appends_eos = options.append_eos
        self.warns_of_plain = options.chat_template and not options.input_template and task not in ("pretrain", "prompts")
        if options.add_bos == "always" and tokenizer.bos is None:
            raise DataError(f"--add_bos always: {options.tokenizer or 'the vocabulary'} has no bos_token",
                            "--add_bos auto, or set it in tokenizer_config.json")

    def lot(self, records):
        self.template.limits.renew()
        samples = [self._in_record(record, lambda: self._drafted(record)) for record in self._marked(records)]
        all_drafts = [draft for drafts, *_ in samples for draft in drafts]
        texts = [draft.text for draft in all_drafts if draft.ids is None]
        encodings = iter(self.tokenizer.encode(texts, with_offsets=any(draft.spans for draft in all_drafts)))
        counts = Counter(read=len(records))
        documents, rejected, margins, labels, columns, ends = [], [], [], [], [], set()
        for record, (drafts, margin, label, others, unused) in zip(records, samples):
            parts = [self._in_record(record, lambda: self._tokens(draft, encodings, counts)) for draft in drafts]
            ends.update(*(trained_ends(ids, mask, self.tokenizer) for ids, mask in parts))
            needs_target = self.has_targets or bool(drafts[0].spans)
            is_pair = self.is_pref or self.is_unpaired and label is None
            fitted = self._fitted_pair(drafts, parts, counts) if is_pair else self._fitted(*parts[0], needs_target, counts)
            counts.update(("left out", name) for draft in drafts for name in draft.left_out)
            counts.update(("unused", name) for name in unused)
            counts["plain"] += self.warns_of_plain and not any(draft.is_chat or draft.ids is not None for draft in drafts) and bool(drafts)
            counts["unanswered"] += not needs_target
            if self.is_unpaired and is_pair:
                counts["taken apart"] += bool(fitted)
                rejected += fitted[1:]  # after all others: neighbours form the mismatched pairs of kto, which need different prompts
                fitted, label = fitted[:1], True
            documents += fitted
            labels += [label] * len(fitted) if self.is_unpaired else []
            margins += [margin] if self.is_pref and fitted else []
            columns += [others] * len(fitted) if self.has_columns else []
        documents += rejected
        labels += [False] * len(rejected)
        counts["desirable"], counts["undesirable"] = labels.count(True), labels.count(False)
        margins = np.array(margins, np.float32)
        counts["no margin"] = int(np.isnan(margins).sum())
        ids, masks = zip(*documents) if documents else ((), ())
        return Lot(np.concatenate([np.empty(0, np.int32), *ids]), np.concatenate([np.empty(0, np.uint8), *masks]),
                   np.array([len(i) for i in ids], np.int64), margins, np.array(labels, np.float32), columns, ends, self.longest,
                   self.usual_ends() if counts["chats"] and not ends else [], counts, sum(record.size for record in records))

    def _marked(self, records):
        """Yields the records, each as the one that is rendered."""
        for record in records:
            self.template.limits.place.where = record.where().encode(errors="replace")[:999]
            yield record

    def usual_ends(self):
        """Returns a list with the special token that the chat template puts after an answer. Data without answers does not contain it."""
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SENTINEL}]
        try:
            text, *_ = self.template.conversation(chat, [], {"tools": None, **self.options.chat_template_kwargs})
        except DataError:
            return []
        after = self.tokenizer.encode([text.rpartition(SENTINEL)[2]], with_offsets=False)[0].ids
        runs = itertools.groupby(after, lambda i: self.tokenizer.special[i])
        return next((list(run)[-1:] for is_special, run in runs if is_special), [])

    @staticmethod
    def _in_record(record, work):
        try:
            return work()
        except GeneralError:
            raise
        except DataError as error:
            raise DataError(f"{record.where()}: {error.what}", error.fix) from None
        except RecursionError:
            raise too_deep(record) from None

    def _drafted(self, record):
        """Returns the drafts of a record (two for a pair), the margin of the pair, the label of the answer, the JSON of its columns, and the names of the unused fields."""
        fields = record.fields()
        drafts = self.draft(fields, self.options, self.template)
        if self.is_pref:
            drafts = [draft._replace(text=self._ended(draft.text)) for draft in drafts]
        elif not self.is_unpaired:
            drafts = [drafts]
        for draft in drafts:
            try:
                (draft.text or "").encode()
            except UnicodeEncodeError as error:
                half = draft.text[error.start]
                raise DataError(f"its text has half of a surrogate pair: {half!r}", "write the whole character") from None
        margin = margin_of(fields) if self.is_pref else None
        label = label_of(fields) if self.is_unpaired and len(drafts) == 1 else None
        columns = columns_of(fields) if self.has_columns else None
        return drafts, margin, label, columns, fields.unused()

    def _ended(self, text):
        """Removes white space after a special token that ends the text, because a reward is read at the last token of a document."""
        stripped = text.rstrip()
        return stripped if stripped.endswith(self.tokenizer.special_texts) else text

    def _tokens(self, draft, encodings, counts):
        if draft.ids is not None:
            outside = np.flatnonzero((draft.ids < 0) | (draft.ids >= self.tokenizer.vocab_size))
            if outside.size:
                t = outside[0]
                raise DataError(f"input_ids[{t}] is {draft.ids[t]}, outside the vocabulary of {self.tokenizer.vocab_size}",
                                "use the tokenizer or model that these ids were made for")
            return draft.ids.astype(np.int32), draft.mask
        counts["chats"] += draft.is_chat
        encoding = next(encodings)
        ids = np.array(encoding.ids, np.int32)
        mask = np.full(len(ids), draft.spans is None, np.uint8)
        counts["unknown"] += encoding.ids.count(self.tokenizer.unknown) if self.tokenizer.unknown is not None else 0
        if draft.spans:
            offsets = encoding.offsets  # read once: each access makes a new list
            for span in draft.spans:
                straddles, ends_turn, ends_twice = mark_targets(mask, span, ids, offsets, self.tokenizer)
                counts["straddling"] += straddles
                counts["doubled ends"] += ends_twice
                counts["open turns"] += draft.is_chat and not ends_turn
        if not draft.is_chat and len(ids):
            ids, mask = self._with_bos_and_eos(ids, mask, counts, ends=draft.spans != [])
        if draft.spans == [] and not self.has_targets and not len(ids):
            raise DataError("the prompt is empty", "leave it out, or write one")
        return ids, mask

    def _with_bos_and_eos(self, ids, mask, counts, ends):
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        if self.adds_bos and ids[0] != bos:
            ids, mask = np.insert(ids, 0, bos), np.insert(mask, 0, 0)
        if self.appends_eos and ends:
            if eos is None:
                raise DataError("cannot be ended: the tokenizer has no eos_token",
                                "--append_eos false, or set it in tokenizer_config.json")
            if ids[-1] != eos:
                counts["doubled ends"] += ending(ids, 0, len(ids), self.tokenizer) == eos
                ids, mask = np.append(ids, np.int32(eos)), np.append(mask, np.uint8(1))
        return ids, mask

    def _fitted(self, ids, mask, needs_target, counts):
        """Returns the document as samples of at most max_len tokens, or an empty list if it has no target and needs one."""
        if not len(ids):
            counts["empty"] += 1
            return []
        limit = self.options.max_len or len(ids)
        pieces = [(ids, mask)]
        if len(ids) > limit:
            if self.options.truncation == "drop":
                counts["too long"] += 1
                self.longest = max(self.longest, len(ids))
                return []
            if self.options.truncation == "split":
                pieces = [(ids[t:t + limit], mask[t:t + limit]) for t in range(0, len(ids), limit)]
            else:
                counts["cut"] += 1
                pieces = [(ids[:limit], mask[:limit])]
        for _, piece_mask in pieces:
            piece_mask[0] = 0
        if needs_target:
            pieces = [piece for piece in pieces if piece[1].any()]
            counts["no target"] += not pieces
        if len(ids) > limit and self.options.truncation == "split":
            counts["split"] += 1
            counts["pieces"] += len(pieces)
        return pieces

    def _fitted_pair(self, drafts, documents, counts):
        """Returns the chosen and the rejected document, of at most max_len tokens each, or an empty list if the pair is dropped."""
        if not drafts:
            counts["no better one"] += 1
            return []
        if drafts[0].spans is None:
            unmark_shared_tokens(*documents)
        elif all(draft.spans for draft in drafts):  # an empty chat has none
            prompts = {draft.text[:draft.spans[-1].start] for draft in drafts}
            counts["other prompts"] += len(prompts) == 2
        for _, mask in documents:
            mask[:1] = 0
        limit = self.options.max_len
        cut = [(ids[:limit], mask[:limit]) for ids, mask in documents]
        too_long = sum(len(ids) > limit for ids, _ in documents)
        self.longest = max(self.longest, *(len(ids) for ids, _ in documents))
        if are_equal(*documents):
            reason = "equal answers"
        elif not all(mask.any() for _, mask in documents):
            reason = "empty answer"
        elif too_long and self.options.truncation == "drop":
            reason = "too long"
        elif are_equal(*cut) or not all(mask.any() for _, mask in cut):
            reason = "cut to nothing"
        else:
            counts["cut"] += too_long
            return cut
        counts[reason] += 1
        return []


def trained_ends(ids, mask, tokenizer):
    """Returns the special tokens that end a run of targets; a model that learned this document stops at them."""
    is_last = mask.astype(bool)
    is_last[:-1] &= mask[1:] == 0
    ends = ids[is_last]
    if tokenizer.special[ends].all():  # the common case
        return set(ends.tolist())
    borders = np.flatnonzero(np.diff(mask, prepend=np.uint8(0), append=np.uint8(0)))
    return {ending(ids, first, stop, tokenizer) for first, stop in borders.reshape(-1, 2)} - {None}


def are_equal(document, other):
    return np.array_equal(document[0], other[0])


def unmark_shared_tokens(document, other):
    """Excludes the common first tokens of both documents from the targets: they are the prompt. The first different token belongs to the answer."""
    (ids, mask), (other_ids, other_mask) = document, other
    shorter = min(len(ids), len(other_ids))
    differing = np.flatnonzero(ids[:shorter] != other_ids[:shorter])
    shared = differing[0] if differing.size else shorter
    mask[:shared] = other_mask[:shared] = 0


# ---- all records, on all cores


def lots_of_records(records, count=1000, size=1 << 20):
    """Groups records into small lists, which bounds the memory."""
    lot, lot_size = [], 0
    for record in records:
        lot.append(record)
        lot_size += record.size
        if len(lot) == count or lot_size >= size:
            yield lot
            lot, lot_size = [], 0
    if lot:
        yield lot


worker_recipe = None  # in a worker process, set once when it starts


def start_worker(recipe, places, started):
    global worker_recipe
    worker_recipe = recipe
    with started.get_lock():
        recipe.template.limits.place = places[started.value]
        started.value += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()


def work(records):
    return worker_recipe.lot(records)


def prepared_lots(recipe, records, processes):
    """Yields the lots in the order of their records, whatever the number of processes."""
    waiting = lots_of_records(records)
    first = list(itertools.islice(waiting, processes))
    if not first:
        return
    fork = multiprocessing.get_context("fork")
    places = fork.RawArray(Place, len(first))
    pool = ProcessPoolExecutor(len(first), fork, start_worker, (recipe, places, fork.Value("i")))
    pending = deque()
    try:
        for lot in itertools.chain(first, waiting):
            pending.append((pool.submit(work, lot), lot))
            if len(pending) > 2 * len(first):
                yield result_of(*pending.popleft())
        while pending:
            yield result_of(*pending.popleft())
    except BrokenProcessPool:
        refuse_late(places)
        raise DataError("a worker process was killed, probably for lack of memory",
                        "free memory, or use fewer cores: taskset -c 0-3") from None
    finally:
        pool.shutdown(cancel_futures=True)


def result_of(future, lot):
    try:
        return future.result()
    except RecursionError:  # a record cannot be sent to a worker
        raise too_deep(next(record for record in lot if not is_sendable(record))) from None


def is_sendable(record):
    try:
        return pickle.dumps(record)
    except RecursionError:
        return False


def too_deep(record):
    return DataError(f"{record.where()}: its JSON is nested too deeply", "leave out its unused parts")


class Progress:
    """Shows one line that changes if the output is a terminal, and otherwise a line every ten seconds."""

    def __init__(self, total):
        self.total = total
        self.done = self.records = self.tokens = 0
        self.begin = self.shown = time.monotonic()
        self.is_terminal = sys.stdout.isatty()
        self.start, self.stop, self.every = ("\r\033[K", "", 0.2) if self.is_terminal else ("", "\n", 10)

    def add(self, lot):
        self.done += lot.size
        self.records += lot.counts["read"]
        self.tokens += len(lot.tokens)
        now = time.monotonic()
        if now - self.shown > self.every:
            self.shown = now
            seconds = now - self.begin
            share = min(1.0, self.done / self.total) if self.total else 0
            left = f"{100 * share:3.0f} %  {seconds * (1 - share) / share:,.0f} s left  " if share else ""
            print(f"{self.start}  {left}{self.records:,} records  {self.tokens:,} tokens  {self.tokens / seconds:,.0f} tokens/s",
                  end=self.stop, flush=True)

    def end(self):
        print(self.start, end="", flush=True)


def prepare(task, options, processes):
    given = argparse.Namespace(**vars(options))
    names = options.input or []
    check_inputs(names)
    tokenizer = (Ids(options.vocab_size, options.eos_token_id) if options.vocab_size else
                 Tokenizer(options.tokenizer, options.tokenizer_chat_template))
    if options.to_bin:
        check_prefix(options.to_bin, tokenizer)
    options.chat_template = options.chat_template and tokenizer.hf.chat_template is not None
    recipe = Recipe(task, options, tokenizer)
    typed = (Record("--prompt", i, None, {"prompt": text}, len(text)) for i, text in enumerate(options.prompt or [], 1))
    records = itertools.chain(typed, read_records(names, tokenizer.eos, options.dataset_probs, options.stopping_strategy, options.seed,
                                                  options.max_samples))
    progress = Progress(None if options.dataset_probs or options.stopping_strategy or options.max_samples else total_size(names))
    counts, ends, usual_ends, targets, longest = Counter(), set(), set(), 0, 0
    file = TokenFile(options.out, tokenizer.vocab_size)
    try:
        for lot in prepared_lots(recipe, records, processes):
            file.append(lot.tokens, lot.mask, lot.lengths, lot.margins, lot.labels, lot.columns)
            counts += lot.counts
            ends |= lot.ends
            usual_ends.update(lot.usual_ends)
            longest = max(longest, lot.longest)
            targets += int(lot.mask.sum())
            progress.add(lot)
        progress.end()
        lengths = np.concatenate(file.lengths)
        summary = table(task, options, counts, lengths, targets)
        if not len(lengths):
            raise DataError(f"no record is left:\n{summary}", longer(tokenizer.directory, longest) if counts["too long"] else "give records with something to learn")
        if options.to_bin:
            summary += "\n" + shown_rows([("token shards", f"{write_shards(options.to_bin, file.all_tokens(), lengths, tokenizer.eos):,}", "")])
        ends = ends or usual_ends
        if options.key and options.key != cache_key(given):
            raise DataError("the data or the tokenizer was changed while it was read", "start again when no other program writes to them")
        read_as = tokenizer.read_as() if task != "prompts" else None  # a model is saved
        if read_as:
            note = "the class by which AutoTokenizer of transformers reads the tokenizer: it makes other ids of some texts"
            summary += "\n" + shown_rows([("read otherwise", read_as, note)])
        file.write(metadata(task, options, tokenizer, ends, counts["chats"], read_as))
    finally:
        progress.end()
        file.close()
    if task != "prompts":
        print(summary)
    elif unused := named_row("fields not used", "unused", counts):
        print(f"prompts: {source(options)}\n{shown_rows(unused)}")


def longer(directory, tokens):
    """Returns the flags with which documents of so many tokens fit the model in the directory."""
    path = os.path.join(directory or "", "config.json")
    config = read_object(path) if os.path.isfile(path) else {}
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int) or positions < 1 or tokens <= positions:
        return f"--max_len {tokens}, or give shorter records"
    if "n_positions" in config:
        return f"give shorter records: the model has {positions} positions"
    return f"""--max_len {tokens} --rope_scaling '{{"rope_type": "yarn", "factor": {math.ceil(tokens / positions)}}}', or give shorter records"""


def metadata(task, options, tokenizer, ends, has_chats, read_as):
    """A model that is trained on the file is saved with its `end_of_turn` and `chat_template`, and a note on `read_as`."""
    template = tokenizer.hf.chat_template
    out = {"kind": task, "vocab_size": str(tokenizer.vocab_size), "tokenizer_hash": tokenizer.hash,
           "max_len": str(options.max_len or 0), "template_hash": fnv1a(str(template)) if template else "",
           "source": source(options, name=os.path.basename), "version": FORMAT_VERSION}
    if ends:
        out["end_of_turn"] = ",".join(map(str, sorted(ends)))
    if read_as:
        out["read_as"] = read_as
    if has_chats:
        out["chat_template"] = template if isinstance(template, str) else template.get("default", "")
    return out


def source(options, name=str):
    return ",".join(map(name, options.input or ["--prompt"]))


def table(task, options, counts, lengths, targets):
    tokens = int(lengths.sum())
    reasons = {"too long": f"longer than {options.max_len} tokens", "no target": "without a target token", "empty": "empty",
               "empty answer": "an answer is empty", "equal answers": "answers are equal", "no better one": "neither answer is better",
               "cut to nothing": "truncated to nothing"}
    dropped = {text: counts[key] for key, text in reasons.items() if counts[key]}
    rows = [("records read", f"{counts['read']:,}", ""), ("dropped", f"{sum(dropped.values()):,}", "")]
    rows += [(f"  {text}", f"{count:,}", "") for text, count in dropped.items()]
    rows += [(f"cut to {options.max_len} tokens", f"{counts['cut']:,}", "")] if counts["cut"] else []
    rows += [("split", f"{counts['split']:,}", f"into {counts['pieces']:,} documents")] if counts["split"] else []
    pairs = len(lengths) // 2 if task == "pref" else 0
    rows += [("pairs kept", f"{pairs:,}", "")] if task == "pref" else [("documents kept", f"{len(lengths):,}", "")]
    rows += [("tokens", f"{tokens:,}", "")]
    if task != "prompts":
        rows += [("target tokens", f"{targets:,}", f"{100 * targets / max(1, tokens):.1f} %")]
    if pairs:
        rows += [length_row("length of the chosen", lengths[0::2]), length_row("length of the rejected", lengths[1::2])]
    elif len(lengths):
        rows += [length_row("length", lengths)]
    if 0 < counts["no margin"] < pairs:
        rows += [("without a margin", f"{counts['no margin']:,}", "which is 0")]
    if counts["other prompts"]:
        rows += [("different prompts", f"{counts['other prompts']:,}", "pairs whose answers do not follow the same text")]
    if task == "unpaired":
        rows += [(name, f"{counts[name]:,}", "answers") for name in ("desirable", "undesirable")]
    if counts["taken apart"]:
        rows += [("pairs taken apart", f"{counts['taken apart']:,}", "into a desirable and an undesirable answer each")]
    if counts["unanswered"] and task == "rl":
        rows += [("without an answer", f"{counts['unanswered']:,}", "prompts alone, for rewards that need no label")]
    if counts["left out", "reasoning"]:
        note = "messages whose reasoning the template leaves out, because turns follow"
        rows += [("reasoning left out", f"{counts['left out', 'reasoning']:,}", note)]
    if counts["left out", "content"]:
        rows += [("changed contents", f"{counts['left out', 'content']:,}", "messages of whose content the template renders only a part, or another text")]
    rows += named_row("keys of messages not read", "left out", counts, "by the template")
    rows += named_row("columns for rewards alone" if task == "rl" else "fields not used", "unused", counts)
    if counts["plain"]:
        rows += [("without the chat template", f"{counts['plain']:,}", "strings stay as they are; --apply_chat_template makes chats of prompts and answers")]
    if counts["unknown"]:
        rows += [("unknown tokens", f"{counts['unknown']:,}", "in place of characters that the vocabulary lacks")]
    if counts["straddling"]:
        note = "answers whose first token also contains the end of the prompt: not a target"
        rows += [("merged starts", f"{counts['straddling']:,}", note)]
    if counts["left out", "no text"]:
        rows += [("empty answers", f"{counts['left out', 'no text']:,}", "trained messages without text: they teach to say nothing")]
    if counts["doubled ends"]:
        rows += [("doubled ends", f"{counts['doubled ends']:,}", "answers or texts that contain their end token, which is added once more")]
    if counts["open turns"]:
        note = "answers after which the template puts no special token: stopping is not learnt"
        rows += [("open turns", f"{counts['open turns']:,}", note)]
    return f"{task}: {source(options)} -> {options.out}\n{shown_rows(rows)}"


def shown_rows(rows):
    return "\n".join(f"  {name:<32}{value:>16}  {note}".rstrip() for name, value, note in rows)


def named_row(title, what, counts, note=""):
    """Returns a row with the names counted as (what, name), the most frequent ones first."""
    found = [(key[1], count) for key, count in counts.most_common() if isinstance(key, tuple) and key[0] == what and key[1] not in ("reasoning", "content", "no text")]
    listed = [f"{name} ({count:,})" for name, count in found[:8]] + ["..."] * (len(found) > 8)
    return [(title, f"{len(found):,}", f"{', '.join(listed)} {note}".strip())] if found else []


def length_row(name, lengths):
    p50, p95 = np.percentile(lengths, [50, 95], method="inverted_cdf")
    return name, f"{lengths.mean():,.1f}", f"mean; min {lengths.min():,}, p50 {p50:,}, p95 {p95:,}, max {lengths.max():,}"


# ---- the command line


def check_utf8(options):
    """Refuses text in another encoding: Python decodes such bytes to lone surrogates, which cannot be written as UTF-8."""
    for value in vars(options).values():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and re.search("[\ud800-\udfff]", text):
                raise DataError(f"{text!r} is not UTF-8", "write it in UTF-8, or rename the file")


def check_together(options):
    if not options.input and not options.prompt:
        raise DataError("there is nothing to prepare", "--input FILE, or --prompt TEXT for the task prompts")
    if options.out is None and options.key != "":
        raise DataError("there is no output file", "--out F.safetensors")
    if options.dataset_probs and len(options.dataset_probs) != len(options.input or []):
        raise DataError(f"--dataset_probs has {len(options.dataset_probs)} probabilities for {len(options.input or [])} inputs",
                        "give one for each file of --input")
    if (options.eos_token_id is None) != (options.vocab_size is None):
        raise DataError("--eos_token_id and --vocab_size go together, in place of --tokenizer", "give both, or --tokenizer DIR alone")
    if options.vocab_size:
        check_ids(options)


def check_ids(options):
    text = [name for name in options.input if not source_of(name).name.endswith(".bin")]
    if text:
        raise DataError(f"{text[0]}: needs a tokenizer; only token shards (.bin) hold ids",
                        "--tokenizer DIR in place of --eos_token_id and --vocab_size")
    if options.eos_token_id >= options.vocab_size:
        raise DataError(f"--eos_token_id {options.eos_token_id} is beyond --vocab_size {options.vocab_size}",
                        "give those of the model's config.json")


def main(arguments):
    ended_by = []  # signals

    def stop(number, _):
        """Ends the program after a signal. The `finally` blocks run, so no file is left behind, and nobody waits for the worker processes."""
        ended_by.append(number)
        for process in multiprocessing.active_children():
            process.kill()
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a shell sets SIGINT to ignored for a job in the background
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, stop)
    try:
        options = build_parser(__doc__).parse_args([snake_case(argument) for argument in arguments])
        check_utf8(options)
        check_together(options)
        if options.environment:
            from tool_calls import schemas_in  # imported here, because few runs need it

            options.tools = schemas_in(options.environment)
        if options.key == "":
            check_inputs(options.input or [])
            print(cache_key(options))
        else:
            if not options.key:  # a file of the cache may be damaged
                refuse_other_file("--out", options.out, b'{"__metadata__": {"kind": ')
            prepare(options.task, options, len(os.sched_getaffinity(0)))
    except DataError as error:
        if ended_by:  # around a fork Python ignores stop's exception, but not that the workers have died
            return 128 + ended_by[0]
        print(trainers_names(str(error), arguments), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
