"""What --input names: a file, a directory, or a data set of the Hugging Face hub, with a subset, a directory and a split.

    NAME[:SUBSET][@DIRECTORY][\\[SPLIT\\]]      squad:plain[validation], chats@2024, saved/chats[test]

The files of a directory, and of a data set that lies in the hub's cache, are found as the library datasets finds them, by their names or by the
table in README.md, and are then read as if they had been named one by one."""

import glob
import os
import re
from typing import NamedTuple, Optional

from errors import DataError

EXTENSIONS = (".jsonl", ".json", ".csv", ".parquet", ".bin")
COMPRESSED = tuple(f"{kind}{packing}" for kind in (".jsonl", ".json", ".csv") for packing in (".gz", ".zst"))


class Source(NamedTuple):
    text: str  # as it was given
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
    parts = re.fullmatch(r"(.*?)(?::([\w.-]+))?(?:@([^@\[\]:]+))?(?:\[([^\[\]]+)\])?", text)
    return Source(text, *parts.groups())


def is_saved(path):
    """Whether datasets has written the directory with save_to_disk."""
    return any(os.path.isfile(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json"))


def check(source):
    """Refuses, before any work is done, what could not be opened."""
    if source.is_hub():
        return
    if os.path.isdir(source.name):
        if not is_saved(source.name):
            files_of(source)
        return
    if not os.path.isfile(source.name):
        raise DataError(f"{source.name}: there is no such file", "give --input an existing file, several with commas between them")
    if source.subset or source.directory or source.split:
        raise DataError(f"{source.text}: {source.name} is one file, which has no subset, directory or split", f"--input {source.name}")
    if not source.name.endswith(EXTENSIONS + COMPRESSED):
        raise DataError(f"{source.name}: unknown kind of file", f"convert it to one of {' '.join(EXTENSIONS)}")
    if os.path.getsize(source.name) == 0:
        raise DataError(f"{source.name}: the file is empty", "give --input a file with records")


def files_of(source, root=None):
    """Returns the files of a directory's subset and split."""
    import datasets

    root = root or source.name
    try:
        config = datasets.load_dataset_builder(root, source.subset, data_dir=source.directory).config
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.text}: holds no data set: {error}",
                        f"a directory with files of the kinds {' '.join(EXTENSIONS[:-1])}, or one written by save_to_disk") from None
    splits = {str(split): [str(file) for file in files] for split, files in (config.data_files or {}).items()}
    files = splits[chosen_split(source, splits)]
    for file in files:
        if not file.endswith(EXTENSIONS + COMPRESSED):
            raise DataError(f"{file}: unknown kind of file", f"convert it to one of {' '.join(EXTENSIONS)}")
        if part := re.search(r"-(\d+)-of-(\d+)\.", os.path.basename(file)):
            pattern = f"{glob.escape(file[:-len(os.path.basename(file))] + os.path.basename(file)[:part.start()])}-*-of-{part[2]}.*"
            if len(glob.glob(pattern)) != int(part[2]):
                raise DataError(f"{file}: is one of {int(part[2])} files, of which {len(glob.glob(pattern))} are there", "download the data set again")
    return files


def chosen_split(source, splits):
    split = source.split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if split not in splits:
        raise DataError(f"{source.text}: has no split {split!r}; it has {', '.join(splits) or 'none'}",
                        f"--input {source.name}[SPLIT], with one of them")
    return split


def unpadded(value, feature=None):
    """Returns a value of a table without the keys that are null: a table gives each object all keys that any of its kind has. `feature` is what
    the library datasets knows about the value; one that holds JSON has no such keys."""
    if isinstance(value, dict) and type(feature).__name__ != "Json":
        kinds = feature if isinstance(feature, dict) else {}
        return {key: unpadded(part, kinds.get(key)) for key, part in value.items() if part is not None}
    if isinstance(value, list) and type(feature).__name__ != "Json":
        kind = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [unpadded(part, kind) for part in value]
    return value


def saved_records(source):
    """Yields the records of a directory that save_to_disk has written, from its memory-mapped files."""
    import datasets

    try:
        data = datasets.load_from_disk(source.name)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.name}: is no directory that save_to_disk has written whole: {error}", "write it again") from None
    if isinstance(data, datasets.DatasetDict):
        data = data[chosen_split(source, data)]
    elif source.split and str(data.split) != source.split:
        raise DataError(f"{source.text}: has no split {source.split!r}; it is one data set", f"--input {source.name}")
    for record in data:
        yield None, unpadded(record, data.features), len(str(record))


def cached_snapshot(source):
    """Returns the directory of a data set in the hub's cache, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(source.name, repo_type="dataset", local_files_only=True)
    except (LocalEntryNotFoundError, OSError):
        return None


def hub_records(source):
    """Yields the records of a hub data set, as they arrive."""
    import datasets

    try:
        # Without a network datasets has what it once converted, which lies in files that it maps into memory.
        data = datasets.load_dataset(source.name, source.subset, data_dir=source.directory, split=source.split or "train",
                                     streaming=not datasets.config.HF_HUB_OFFLINE)
        for record in data:
            yield None, unpadded(record, getattr(data, "features", None)), len(str(record))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source.text}: there is no such file, and neither the hub nor its cache has that data set: {error}",
                        f"check the name; or, where there is a network: hf download --repo-type dataset {source.name} --local-dir DIR, "
                        "and --input DIR") from None
