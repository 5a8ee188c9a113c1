"""The sources in --input: a file, a directory, or a data set on the Hugging Face hub, with a subset, a directory and a split.

    NAME[:SUBSET][@DIRECTORY][\\[SPLIT\\]]      squad:plain[validation], chats@2024, saved/chats[test], chats.jsonl[train[:10%]+train[-5:]]

The files of a directory, and of a data set in the hub's cache, are found as by the library datasets, by their names or by the
table in README.md, and are then read as if they had been named one by one. Splits use the syntax of datasets; a single file is a split named train."""

import contextlib
import glob
import os
import re
import sys
from typing import NamedTuple, Optional

from errors import DataError
from tables import records_of, saved_records
from whole_file import refuse_disguise

FILES_TO_IGNORE = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")  # as in datasets
EXTENSIONS = (".jsonl", ".json", ".csv", ".parquet", ".bin")
COMPRESSED = tuple(f"{kind}{packing}" for kind in (".jsonl", ".json", ".csv") for packing in (".gz", ".zst"))


class Source(NamedTuple):
    text: str  # as given by the user
    name: str
    subset: Optional[str] = None
    directory: Optional[str] = None
    split: Optional[str] = None

    def is_hub(self):
        return not os.path.exists(self.name) and not self.name.endswith(EXTENSIONS + COMPRESSED) and \
            re.fullmatch(r"[\w.-]+/[\w.-]+", self.name) is not None


def source_of(text):
    if os.path.exists(text):
        return Source(text, text)
    parts = re.fullmatch(r"(.*?)(?::([\w.-]+))?(?:@([^@\[\]:]+))?(?:\[(.*)\])?", text, re.DOTALL)
    return Source(text, *parts.groups())


def files_for(text):
    """Returns the names that match a name with *, each with its split."""
    if "*" not in text or os.path.exists(text):
        return [text]
    pattern = re.fullmatch(r"(.*?)((?:\[[^*]*\])?)", text, re.DOTALL)
    files = sorted(glob.glob(text)) or [file + pattern[2] for file in sorted(glob.glob(pattern[1]))]
    if not files:
        raise DataError(f"{text}: there is no such file", "give --input an existing file, several with commas between them")
    return files


def is_saved(path):
    """True if the directory was written by save_to_disk of datasets."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))


def check(source):
    """Refuses, before any work is done, sources that could not be opened."""
    if source.is_hub():
        return
    if not os.path.isdir(source.name):
        check_file(source)
    split_names(source, splits_of(source))


def check_file(source):
    if os.path.exists(source.name) and not os.path.isfile(source.name):
        raise DataError(f"{source.name}: is not a regular file", "write the records to a file, whose name tells its kind: records.jsonl")
    if not os.path.isfile(source.name):
        raise DataError(f"{source.name}: there is no such file", "give --input an existing file, several with commas between them")
    if source.subset not in (None, "default") or source.directory:
        raise DataError(f"{source.text}: {source.name} is one file, which has no subset or directory", f"--input {source.name}")
    if not source.name.endswith(EXTENSIONS + COMPRESSED):
        prepared = source.name.endswith(".safetensors")
        raise DataError(f"{source.text}: is prepared data, which has no splits" if prepared else f"{source.name}: unknown kind of file",
                        "--max_samples N" if prepared else f"convert it to one of {' '.join(EXTENSIONS)}")
    refuse_disguise(source.name)
    if os.path.getsize(source.name) == 0:
        raise DataError(f"{source.name}: the file is empty", "give --input a file with records")


def splits_of(source):
    """Returns {split: its files, or a data set of datasets}, or None if only the hub has the data set."""
    if os.path.isfile(source.name):
        return {"train": [source.name]}
    if os.path.isdir(source.name):
        return saved_splits(source) if is_saved(source.name) else splits_of_directory(source, source.name)
    snapshot = cached_snapshot(source)
    return splits_of_directory(source, snapshot) if snapshot else None


def splits_of_directory(source, root):
    import datasets

    try:
        config = datasets.load_dataset_builder(root, source.subset, data_dir=source.directory).config
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.text}: contains no data set: {error}",
                        f"give a directory with files of the kinds {' '.join(EXTENSIONS[:-1])}, or one written by save_to_disk") from None
    splits = {str(split): [str(file) for file in files] for split, files in (config.data_files or {}).items()}
    for name in split_names(source, splits):
        check_files(splits[name])
    if source == Source(root, root) and not os.path.exists(os.path.join(root, "README.md")):
        refuse_left_out(root, splits)
    return splits


def refuse_left_out(root, splits):
    """Refuses a directory of which no split is named if its splits leave files out: datasets reads one kind of file and, if names indicate splits,
    only those."""
    read = [os.path.realpath(file) for files in splits.values() for file in files]
    for file in sorted(glob.glob(f"{glob.escape(root)}/**/*", recursive=True)):
        if file.endswith((*EXTENSIONS[:-1], *COMPRESSED)) and os.path.realpath(file) not in read and os.path.basename(file) not in FILES_TO_IGNORE:
            raise DataError(f"{root}: its splits ({', '.join(splits)}) leave out {os.path.relpath(file, root)}",
                            f"name a split: --input '{root}[{next(iter(splits))}]'; or the files, which may be of several kinds: {root}/*")


def check_files(files):
    for file in files:
        if not file.endswith(EXTENSIONS + COMPRESSED):
            raise DataError(f"{file}: unknown kind of file", f"convert it to one of {' '.join(EXTENSIONS)}")
        refuse_disguise(file)
        if part := re.search(r"-(\d+)-of-(\d+)\.", os.path.basename(file)):
            pattern = f"{glob.escape(file[:-len(os.path.basename(file))] + os.path.basename(file)[:part.start()])}-*-of-{part[2]}.*"
            if len(glob.glob(pattern)) != int(part[2]):
                raise DataError(f"{file}: is one of {int(part[2])} files, but only {len(glob.glob(pattern))} exist", "download the data set again")


def saved_splits(source):
    """Returns the memory-mapped data sets that save_to_disk has written."""
    import datasets

    try:
        data = datasets.load_from_disk(source.name)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.name}: is not a complete directory of save_to_disk: {error}", "write it again") from None
    return dict(data) if isinstance(data, datasets.DatasetDict) else {str(data.split or "train"): data}


def split_names(source, splits):
    """Returns the splits named by a source, each once; without a name it is train, or the only one."""
    if source.split is None:
        names = ["train" if "train" in splits or len(splits) != 1 else next(iter(splits))]
    else:
        names = list(dict.fromkeys(re.match(r"\s*(.*?)\s*(?:[\[(]|$)", part, re.DOTALL)[1] for part in source.split.split("+")))
    for name in names:
        if name not in splits:
            raise DataError(f"{source.text}: has no split {name!r}; it has {', '.join(splits) or 'none'}",
                            f"--input {source.name}[SPLIT], with one of them")
    return names


def slices_of(source, splits, length_of):
    """Parses the splits named by a source, in order: [(split, begin, end or None)], in records.

    length_of counts the records of a split; it is called only for a slice counted from the end or in percent."""
    names = split_names(source, splits)
    if source.split is None or source.split in splits:
        return [(names[0], 0, None)]
    from datasets import ReadInstruction

    try:
        spec = source.split.replace(" ", "")
        lengths = {name: length_of(splits[name]) if re.search("[%-]", spec) else sys.maxsize for name in names}
        slices = ReadInstruction.from_spec(spec).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise DataError(f"{source.text}: {source.split!r} names no records: {error}",
                        f"--input '{source.name}[{names[0]}[:100]]', or [10:20], [:10%], [-5:] in its place, with + between several") from None
    return [(part.splitname, part.from_, part.to) for part in slices]


def cached_snapshot(source):
    """Returns the directory of a data set in the hub's cache, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(source.name, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):  # ValueError: no possible name
        return None


def hub_records(source):
    """Yields the records of a hub data set as they arrive."""
    import datasets

    # Without a network, datasets uses its earlier conversions in memory-mapped files. A stream has no slices.
    streams = not datasets.config.HF_HUB_OFFLINE and not re.search(r"[\[+]", source.split or "train")
    with hub_errors(source):
        data = datasets.load_dataset(source.name, source.subset, data_dir=source.directory, split=source.split or "train", streaming=streams)
        if not streams:
            yield from saved_records(source.text, data)
        elif data.features is None:  # a table without objects, as of CSV
            yield from ((None, record, len(str(record))) for record in data)
        else:
            for fields in records_of(source.text, data.features.arrow_schema, ([record] for record in data.decode(False))):
                yield None, fields, len(str(fields))


def hub_version(source):
    """Returns the commit that hub_records() would read now."""
    import datasets

    with hub_errors(source):
        return datasets.load_dataset_builder(source.name, source.subset, data_dir=source.directory).hash


@contextlib.contextmanager
def hub_errors(source):
    import datasets

    try:
        yield
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.text}: there is no such file, and neither the hub nor its cache has that data set: {error}",
                        f"check the name; or, where there is a network: hf download --repo-type dataset {source.name} --local-dir DIR, "
                        "and --input DIR") from None
