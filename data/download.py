"""Files from the network: checked by sha256, given up after seconds where there is no network."""

import hashlib
import os
import tempfile

# r50k_base is GPT-2's vocabulary in one file; tiktoken's "gpt2" needs two for the same ids.
R50K_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def download(url, expected, timeout=20):
    """Bytes of `url` whose sha256 is `expected`; OSError with the reason otherwise."""
    import requests  # tiktoken's own dependency; slow to import, so only here
    try:
        reply = requests.get(url, timeout=timeout)
        reply.raise_for_status()
    except requests.RequestException as e:
        raise OSError(f"{url}: {type(e).__name__}") from None
    if sha256(reply.content) != expected:
        raise OSError(f"{url}: the content has sha256 {sha256(reply.content)}, expected {expected}")
    return reply.content


def write_atomically(path, content):
    """Writes bytes so that another process sees all of them or no file."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(f"{path}.tmp-{os.getpid()}", "wb") as f:
        f.write(content)
    os.replace(f.name, path)


def gpt2_ranks():
    """Text of GPT-2's rank file: from tiktoken's cache, or downloaded to it."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get(
        "DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache")))
    # tiktoken's rule: the name is the sha1 of the address, and an empty folder name means no cache
    path = os.path.join(folder, hashlib.sha1(R50K_URL.encode()).hexdigest()) if folder else ""
    if os.path.isfile(path):
        with open(path, "rb") as f:
            content = f.read()
        if sha256(content) == R50K_SHA256:
            return content.decode("ascii")
    try:
        content = download(R50K_URL, R50K_SHA256)
    except OSError as e:
        raise ValueError(
            f"tokenizer gpt2: its rank file (0.8 MB) is not cached ({path or 'no cache folder'}) "
            f"and could not be downloaded ({e}). Without a network: on another machine\n"
            f"    curl -O {R50K_URL}\n    and then --tokenizer r50k_base.tiktoken, or copy it to "
            f"{path or '$TIKTOKEN_CACHE_DIR'}; or use --tokenizer byte, which needs no file"
        ) from None
    if path:
        try:
            write_atomically(path, content)
        except OSError:
            pass  # a cache that cannot be written only costs the next download
    return content.decode("ascii")
