#!/usr/bin/env python3
"""Downloads a model, or its tokenizer, from the Hugging Face hub to the cache of huggingface_hub.

    hub.py OWNER/NAME [REVISION]"""

import os
import re
import sys
from importlib.util import find_spec

from errors import DataError

TOKENIZER = ["tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "config.json", "generation_config.json"]


def is_hub_name(name):
    """True if the name is OWNER/NAME[@REVISION], and not a file or directory."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name) is not None and not name.startswith(".") and not os.path.exists(name)


def snapshot(model, revision="main", weights=True):
    """Returns the directory of a model in the cache, after a download if necessary."""
    if find_spec("huggingface_hub") is None:
        raise DataError(f"{model}: Python has no huggingface_hub to fetch it from the hub with", "make deps; or give a directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    elsewhere = f"where there is a network: hf download {model}{'' if revision == 'main' else f' --revision {revision}'} --local-dir DIR, and give DIR"
    try:
        return snapshot_download(model, revision=revision, allow_patterns=TOKENIZER + ["*.safetensors", "*.safetensors.index.json"][:2 * weights])
    except GatedRepoError:
        raise DataError(f"{model}: the model is gated: its owner requires a login",
                        f"accept the terms at https://huggingface.co/{model}, then: hf auth login") from None
    except RevisionNotFoundError:
        raise DataError(f"{model}: it has no revision {revision!r} on the hub", f"see https://huggingface.co/{model}/commits/main") from None
    except RepositoryNotFoundError:
        raise DataError(f"{model}: there is no such directory, and the hub has no such model, or it is private",
                        "check the name; for a private model: hf auth login") from None
    except Exception as error:  # from the network, or from a server that is not a hub
        raise DataError(f"{model}: there is no such directory, the cache does not have that model, and the hub cannot be reached: "
                        f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
                        f"check the network (HF_ENDPOINT, HTTPS_PROXY); or, {elsewhere}") from None


def main(model, revision="main"):
    message = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # shows progress at once; standard error gets only an error
    try:
        snapshot(model, revision)
    except DataError as error:
        print(error, file=message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
