# A GPU image: NVIDIA's PyTorch build with this project on top.
#
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch:26.06-py3 -t lattice .
#   docker run --gpus all --ipc=host -it lattice
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

WORKDIR /workspace/lattice
COPY pyproject.toml setup.py README.md LICENSE ./
COPY megatron megatron
# The base image pins its own torch in the constraints file that PIP_CONSTRAINT names, so this
# adds the optional libraries and leaves torch alone.
RUN pip install --no-cache-dir -e '.[tokenizers,hf,logging,config]' pytest
COPY . .
CMD ["bash"]
