"""Flags of the corpus and of the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag

TOKENIZER_TYPES = (
    "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer",
    "MultimodalTokenizer", "NullTokenizer", "NullMultimodalTokenizer", "SFTTokenizer",
)  # fmt: skip
"""Megatron's tokenizer types."""

OWN_TOKENIZER_TYPES = ("ByteTokenizer",)
"""Tokenizer types that Megatron does not have."""

_TEXT_ONLY = "use HuggingFaceTokenizer"


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Corpora, their blend, and how documents are cut into samples and masked."""

    data_path: list[str] | None = flag(None, nargs="*")
    """Corpora: a list of path prefixes, or of alternating weights and path prefixes."""
    split: str | None = None
    """Shares of train, validation and test documents, for example 969,30,1."""
    train_data_path: list[str] | None = flag(None, nargs="*")
    """Corpora for training, in the form of --data-path."""
    valid_data_path: list[str] | None = flag(None, nargs="*")
    """Corpora for validation, in the form of --data-path."""
    test_data_path: list[str] | None = flag(None, nargs="*")
    """Corpora for test, in the form of --data-path."""
    data_args_path: str | None = None
    """File with the words of --data-path, or with {prefix: weight} as JSON."""
    per_split_data_args_path: str | None = None
    """JSON file with the words of --data-path, or {prefix: weight}, for each of train, valid and
    test."""
    multiple_validation_sets: bool = False
    """Evaluate each corpus of --valid-data-path separately."""
    data_cache_path: str | None = None
    """Directory of index files. Default: the directory of the corpus."""
    object_storage_cache_path: str | None = None
    """Directory for local copies of corpora given by URL (s3://, gs://, ...)."""
    data_audit_path: str | None = flag(
        None, per_micro_batch="the record has one line for each micro batch of each replica"
    )
    """Directory for a record of every consumed sample, for tools/inspect_dataset.py audit."""
    allow_changed_data: bool = False
    """Resume even if the order of the training samples differs from the checkpoint's."""
    mock_data: bool = False
    """Train on synthetic samples; read no files."""
    mmap_bin_files: bool = flag(True, "--no-mmap-bin-files")
    """Read token files by pread instead of mapping them into memory."""
    num_workers: int = 2
    """Processes that prepare batches. With 0, the training process prepares them."""
    dataloader_type: str = flag(
        None,
        choices=("single", "cyclic", "cyclic-megatron", "external"),
        refuse_values={"external": "use single, or pass your iterators to pretrain()"},
        per_micro_batch={"cyclic": "global batches are taken in order"},
    )
    """Order of samples. single: one pass. cyclic: epochs with a new shuffle each, equal in every
    layout. cyclic-megatron: the epochs of Megatron-LM, which depend on the number of replicas and
    the micro batch size. Default: single."""
    sample_order: str = flag("megatron", choices=("megatron", "native"))
    """megatron: shuffle documents and samples by index arrays equal to Megatron-LM's. native: read
    windows of the corpus in a keyed order, which opens corpora of any size at once and reads each
    sample in one piece."""
    data_sharding: bool = flag(True, "--no-data-sharding")
    """With --dataloader-type cyclic-megatron, shuffle the samples of all replicas together instead
    of each replica's own part. cyclic always shuffles them together."""
    num_dataset_builder_threads: int = 1
    """Threads that build index files."""
    reset_position_ids: bool = False
    """Restart positions after each end of document."""
    reset_attention_mask: bool = False
    """Do not attend across an end of document."""
    eod_mask_loss: bool = False
    """Do not train on the end-of-document token."""
    mid_level_dataset_surplus: float = 0.005
    """Build this share of additional samples for each corpus of a blend."""
    sft: bool = False
    """Train on packed conversations of tools/preprocess_data.py --sft; their mask selects the
    tokens of the loss."""
    fim_data: bool = False
    """Cut documents into prefix, middle and suffix and move the middle to the end (fill in the
    middle, arXiv 2207.14255)."""
    fim_rate: float = flag(0.5, part_of="fim_data")
    """Probability that a document is cut."""
    fim_spm_rate: float = flag(0.5, part_of="fim_data")
    """Share of the cut documents that begin with the suffix; the others begin with the prefix."""
    fim_fragment_rate: float | None = flag(None, part_of="fim_data")
    """Probability that a file is cut, in a document that --fim-split-sample splits. Default:
    --fim-rate."""
    fim_split_sample: str | None = flag(None, part_of="fim_data")
    """Token between the files of a document. Each file is cut separately."""
    fim_no_prefix: str | None = flag(None, part_of="fim_data")
    """Do not cut documents or files that begin with this text."""
    fim_prefix_token: str = flag("<fim_prefix>", part_of="fim_data")
    """Token before the prefix."""
    fim_middle_token: str = flag("<fim_middle>", part_of="fim_data")
    """Token before the middle."""
    fim_suffix_token: str = flag("<fim_suffix>", part_of="fim_data")
    """Token before the suffix."""
    fim_pad_token: str = flag("<fim_pad>", part_of="fim_data")
    """Token that pads a suffix. If the vocabulary lacks it, the tokenizer's own is used."""
    fim_eod_token: str = flag("<|endoftext|>", part_of="fim_data")
    """Token between documents. If the vocabulary lacks it, the tokenizer's own is used."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Type, files and size of the tokenizer."""

    tokenizer_type: str | None = flag(
        None,
        choices=TOKENIZER_TYPES + OWN_TOKENIZER_TYPES,
        refuse_values={
            "MultimodalTokenizer": _TEXT_ONLY,
            "NullMultimodalTokenizer": "use NullTokenizer",
            "SFTTokenizer": _TEXT_ONLY,
        },
    )
    """Type of tokenizer."""
    tokenizer_model: str | None = None
    """Model file or directory, or a name on the Hugging Face hub."""
    vocab_file: str | None = None
    """Vocabulary of a BPE tokenizer, or of BERT's WordPiece."""
    merge_file: str | None = None
    """Merges of a BPE tokenizer."""
    vocab_size: int | None = None
    """Number of ids. Needed by NullTokenizer; overrides the size of other tokenizers."""
    padded_vocab_size: int | None = None
    """Rows of the embedding. Default: the tokenizer's size, padded."""
    vocab_extra_ids: int = 0
    """Number of sentinel tokens for hidden spans (T5), added after the tokenizer's own ids."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Regular expression that splits text for TikToken."""
    tiktoken_num_special_tokens: int = 1000
    """Number of special tokens of TikToken."""
    chat_template: str | None = flag(None, metavar="FILE")
    """Jinja template of conversations for pretrain_vlm.py and the server. Default: the tokenizer's
    template. Without any template, pretrain_vlm.py concatenates the messages and ends each answer
    with the end-of-document token."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Do not add the special tokens of a Hugging Face tokenizer at the begin and end of a text."""
    trust_remote_code: bool = False
    """Allow a Hugging Face tokenizer to run its own Python code."""
