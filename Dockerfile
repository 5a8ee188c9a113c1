# docker build -t train_llama . && docker run --rm train_llama                        the bundled demo
# docker run --rm -v $PWD:/work -w /work train_llama train_llama sft --model OWNER/NAME --data chats.jsonl --output_dir out
#
# For GPUs: docker build --build-arg BASE=nvidia/cuda:13.0.0-devel-ubuntu24.04 -t train_llama . && docker run --gpus all --rm train_llama
ARG BASE=debian:bookworm
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ make python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/train_llama
COPY . .
# `plain` compiles for all CPUs of the architecture's kind: the image may run elsewhere than it was made.
RUN make deps && make plain && rm -rf build /var/lib/apt/lists/*
ENV PATH=/opt/train_llama:$PATH
CMD ["train_llama"]
