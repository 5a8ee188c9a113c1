"""Reads a Hugging Face tokenizer directory: converts text to ids with offsets, identifies special tokens, and computes the hash that ties data
to a model."""

import glob
import json
import os
from functools import lru_cache
from types import SimpleNamespace

import numpy as np

from errors import DataError
from hub import is_hub_name, snapshot
from whole_file import refuse_disguise

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # hides the note of transformers about missing torch
# The files that transformers may read in a tokenizer's directory. It repairs Mistral's tokenizers depending on the model in config.json.
FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*", "config.json")
OBJECTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "config.json")  # without tokenizer.json
MOST_IDS = 1 << 24  # an id beyond this is a broken file, not a vocabulary
# AutoTokenizer reads tokenizer.json unchanged for these values of model_type and tokenizer_class.
PLAIN_TYPES = ("exaone4", "granite", "internlm2", "llama", "mistral", "mixtral", "olmo2", "phi3", "seed_oss", "smollm3")
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Texts in which tokenizers differ: numbers, contractions, spaces, capitals, accents, scripts.
PROBES = ("The sum of 123456 and 7.5e3 isn't 2024-01-31!", "  two  spaces\n\n\ttabs\r\n", "na\u00efve cafe\u0301 \ufb01 \u00bd \u0130stanbul", "\u65e5\u672c\u8a9e\u3002\ud55c\uad6d\uc5b4",
          "I'LL don't", "x+=1; //!?? <b>", "\U0001f642\u200d", "a")


class Tokenizer:
    """The functions of a fast tokenizer that preparation needs. It reads tokenizer.json unchanged, so that the ids match its hash."""

    def __init__(self, directory, chat_template=None):
        if is_hub_name(directory):
            directory = snapshot(*directory.split("@"), weights=False)
        self.directory = directory
        entries = read_vocabulary(directory)
        for path in tokenizer_files(directory):
            if os.path.basename(path) in OBJECTS:
                refuse_broken(path)
        self.hash = tokenizer_hash(entries)
        self.vocab_size = max(entries) + 1  # the largest id + 1
        self.hf = load_fast_tokenizer(directory)
        if not {*self.hf.get_vocab().values(), *self.hf.all_special_ids} <= entries.keys():
            raise DataError(f"{directory}: tokenizer_config.json adds tokens that tokenizer.json does not have",
                            "load it with transformers' AutoTokenizer and save it again with save_pretrained")
        if chat_template is not None:
            self.hf.chat_template = chat_template
        self.bos = self.hf.bos_token_id
        self.eos = self.hf.eos_token_id
        unknown = getattr(self.hf.backend_tokenizer.model, "unk_token", self.hf.unk_token)  # a Unigram model does not tell
        self.unknown = self.hf.convert_tokens_to_ids(unknown) if unknown else None
        self.special = np.zeros(self.vocab_size, bool)
        self.special[[i for i, (_, special) in entries.items() if special] + self.hf.all_special_ids] = True
        self.is_blank = lru_cache(maxsize=None)(lambda i: self.hf.decode([i]).isspace())
        self.special_texts = tuple(entries[i][0] for i in np.flatnonzero(self.special))

        self.encoder = self.hf.backend_tokenizer
        self.encoder.no_truncation()
        self.encoder.no_padding()
        self.adds_bos = self.bos is not None and self.encoder.encode("a").ids[:1] == [self.bos]
        # The post-processor would add special tokens, which Recipe does, and may exclude the space before a word from the offsets. Then a
        # token with the last space of the prompt would appear to be wholly inside the answer.
        self.encoder.post_processor = None

    def read_as(self):
        """Returns the class by which AutoTokenizer of transformers reads the directory, if it makes other ids of some texts. Such a class builds its own
        normalizer and pre-tokenizer in place of those in tokenizer.json."""
        if (value_in(self.directory, "config.json", "model_type") in (None, *PLAIN_TYPES)
                and value_in(self.directory, "tokenizer_config.json", "tokenizer_class") in PLAIN_CLASSES):
            return None
        from transformers import AutoTokenizer  # imported here, because that takes 0.3 seconds

        try:
            other = AutoTokenizer.from_pretrained(self.directory, local_files_only=True, trust_remote_code=False)
            backend = other.backend_tokenizer
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # transformers cannot read it so, for lack of config.json, of a package, or of a vocabulary
            return None
        if stages(backend) == stages(self.encoder):
            return None
        texts = [*PROBES, *(f"a{special} b{special}c" for special in self.special_texts[:32])]
        same = all(backend.encode(text, add_special_tokens=False).ids == self.encoder.encode(text, add_special_tokens=False).ids for text in texts)
        return None if same else type(other).__name__

    def encode(self, texts, with_offsets):
        """Returns one encoding for each text, without special tokens added. It is faster without offsets."""
        encode = self.encoder.encode_batch if with_offsets else self.encoder.encode_batch_fast
        return encode(texts, add_special_tokens=False)


def value_in(directory, name, key):
    path = os.path.join(directory, name)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file).get(key)


def stages(backend):
    return [stage and stage.__getstate__() for stage in (backend.normalizer, backend.pre_tokenizer)]


class Ids:
    """Replaces a tokenizer if all data are ids already."""

    directory, hash, bos, unknown, adds_bos = None, "", None, None, False
    hf = SimpleNamespace(chat_template=None, special_tokens_map={}, added_tokens_decoder={})

    def __init__(self, vocab_size, eos):
        self.vocab_size, self.eos = vocab_size, eos
        self.special = np.arange(vocab_size) == eos

    def is_blank(self, i):
        return False

    def read_as(self):
        return None

    def encode(self, texts, with_offsets):
        return []


def tokenizer_files(directory):
    """Returns the files of a tokenizer. Refuses a link without its target, a pipe or a device in place of one, which transformers ignores."""
    paths = sorted({path for pattern in FILES for path in glob.glob(os.path.join(glob.escape(directory), pattern))})
    for path in paths:
        if not os.path.isfile(path) and (path.endswith((".json", ".jinja")) or not os.path.isdir(path)):
            raise DataError(f"{path}: is not a regular file", "copy the file from the model again")
    return [path for path in paths if os.path.isfile(path)]


def refuse_broken(path):
    """Refuses a file that is not a JSON object, with its name, which messages of transformers lack."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is broken JSON: {error}", "copy the file from the model again") from None


def read_vocabulary(directory):
    """Returns {id: (token, special)} of tokenizer.json: the model's vocabulary, in which added tokens replace others of the same id."""
    if not os.path.isdir(directory):
        raise DataError(f"{directory}: there is no such directory", "give --tokenizer the directory of a model or tokenizer")
    path = os.path.join(directory, "tokenizer.json")
    if path not in tokenizer_files(directory):
        raise DataError(f"{directory}: contains no tokenizer.json",
                        "load it with transformers' AutoTokenizer and save it again with save_pretrained")
    refuse_disguise(path)
    try:
        with open(path, encoding="utf-8") as file:
            tokenizer = json.load(file)
        vocab = tokenizer["model"]["vocab"]
        by_id = {i: token for token, i in vocab.items()} if isinstance(vocab, dict) else {i: v[0] for i, v in enumerate(vocab)}
        entries = {i: (token, False) for i, token in by_id.items()}
        entries.update({added["id"]: (added["content"], added["special"]) for added in tokenizer["added_tokens"]})
        for i, (token, special) in entries.items():
            if type(i) is not int or not 0 <= i < MOST_IDS or not isinstance(token, str) or not isinstance(special, bool):
                raise TypeError(f"the token {token!r} has the id {i!r}, and is special: {special!r}")
            token.encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: is not a tokenizer: {type(error).__name__}: {error}", "copy the file from the model again") from None
    if not entries:
        raise DataError(f"{path}: has an empty vocabulary", "copy the file from the model again")
    return entries


def tokenizer_hash(entries):
    """Returns FNV-1a (64 bit, 16 hex digits) of the UTF-8 of f"{id}\\t{token}\\t{special}\\n" for all ids, increasing; special is 1 or 0.

    Two tokenizers have the same hash if every id means the same in both, however their files are laid out."""
    return fnv1a("".join(f"{i}\t{token}\t{int(special)}\n" for i, (token, special) in sorted(entries.items())))


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def load_fast_tokenizer(directory):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the work is spread over processes, one thread each
    from transformers import PreTrainedTokenizerFast  # imported here, because that takes a second

    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a broken file can raise any exception, also a panic of tokenizers, which is not an Exception
        raise DataError(f"{directory}: transformers cannot load the tokenizer: {error}",
                        "copy its files from the model again") from None
