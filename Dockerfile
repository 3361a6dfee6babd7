# A GPU image: NVIDIA's PyTorch build with this project on top.
#
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch:26.06-py3 -t lattice .
#   docker run --gpus all --shm-size 32g --ulimit memlock=-1 --ulimit stack=67108864 -it lattice
#
# The flags of `docker run` are explained in docs/clusters.md. No image was built from this file yet.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

WORKDIR /workspace/lattice
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY megatron megatron
COPY megatron_lattice megatron_lattice
COPY tools/constraints_beside.py tools/
# The base image pins torch and other packages in the constraints file named by PIP_CONSTRAINT. pip
# applies both files, so packages that the base pins are removed from our file.
RUN python tools/constraints_beside.py torch "${PIP_CONSTRAINT:-}" < constraints.txt > beside.txt \
    && pip install --no-cache-dir -e '.[tokenizers,hf,logging,wandb,config,data,fast,server,eval]' pytest -c beside.txt
COPY . .
CMD ["bash"]
