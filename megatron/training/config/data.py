"""Flags of the corpus and of the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag

TOKENIZER_TYPES = (
    "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer",
    "MultimodalTokenizer", "NullTokenizer", "NullMultimodalTokenizer", "SFTTokenizer",
)  # fmt: skip
"""Types of Megatron."""

OWN_TOKENIZER_TYPES = ("ByteTokenizer",)
"""Types that only exist here."""

_TEXT_ONLY = "use HuggingFaceTokenizer"


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where samples come from and how they are cut, blended and masked."""

    data_path: list[str] | None = flag(None, nargs="*")
    """Corpora: path prefixes, or weight and prefix in turn."""
    split: str | None = None
    """Share of train, validation and test documents, for example 969,30,1."""
    train_data_path: list[str] | None = flag(None, nargs="*")
    """Corpora of training alone."""
    valid_data_path: list[str] | None = flag(None, nargs="*")
    """Corpora of validation alone."""
    test_data_path: list[str] | None = flag(None, nargs="*")
    """Corpora of test alone."""
    data_args_path: str | None = None
    """File that holds what --data-path would, or {prefix: weight} as JSON."""
    per_split_data_args_path: str | None = None
    """JSON file with one such list, or {prefix: weight}, for each of train, valid and test."""
    multiple_validation_sets: bool = False
    """Evaluate each corpus of --valid-data-path by itself."""
    data_cache_path: str | None = None
    """Directory of index files. Default beside the corpus."""
    object_storage_cache_path: str | None = None
    """Folder of local copies of corpora that are named by URL (s3://, gs://, ...)."""
    data_audit_path: str | None = flag(
        None, per_micro_batch="the record has one line for each micro batch of each replica"
    )
    """Folder of a record of every consumed sample, for tools/inspect_dataset.py audit."""
    allow_changed_data: bool = False
    """Resume although the order of the training samples is another than that of the checkpoint."""
    mock_data: bool = False
    """Synthetic samples; no files are read."""
    mmap_bin_files: bool = flag(True, "--no-mmap-bin-files")
    """Read token files by pread instead of mapping them."""
    num_workers: int = 2
    """Processes that prepare batches; 0 prepares them in the training process."""
    dataloader_type: str = flag(
        None,
        choices=("single", "cyclic", "cyclic-megatron", "external"),
        refuse_values={"external": "use single, or pass your iterators to pretrain()"},
        per_micro_batch={"cyclic": "global batches are taken in order"},
    )
    """Order of samples: one pass (single), reshuffled epochs that are equal in every layout
    (cyclic), or the reshuffled epochs of Megatron-LM, which depend on the number of replicas and
    the micro batch size (cyclic-megatron). Default single."""
    sample_order: str = flag("megatron", choices=("megatron", "native"))
    """Shuffle documents and samples by index arrays equal to Megatron-LM's, or compute windows of
    the corpus in a keyed order: opens at once at any size, reads each sample in one piece."""
    data_sharding: bool = flag(True, "--no-data-sharding")
    """Order cyclic-megatron: shuffle the samples of all replicas together instead of giving each
    replica its own part. Order cyclic always does."""
    num_dataset_builder_threads: int = 1
    """Threads that build index files."""
    reset_position_ids: bool = False
    """Count positions anew after each end of document."""
    reset_attention_mask: bool = False
    """Do not attend across an end of document."""
    eod_mask_loss: bool = False
    """Do not train on the end-of-document token."""
    mid_level_dataset_surplus: float = 0.005
    """Share by which members of a blend are built longer than asked for."""
    sft: bool = False
    """Train on packed conversations, with the loss where their mask says; made by
    tools/preprocess_data.py --sft."""
    fim_data: bool = False
    """Cut the documents in a sample in three and let the middle come last (fill in the middle,
    arXiv 2207.14255)."""
    fim_rate: float = flag(0.5, part_of="fim_data")
    """Probability that a document is cut."""
    fim_spm_rate: float = flag(0.5, part_of="fim_data")
    """Share of those that begin with the suffix; the others begin with the prefix."""
    fim_fragment_rate: float | None = flag(None, part_of="fim_data")
    """Probability that a file is cut, in a document that --fim-split-sample splits. Default
    --fim-rate."""
    fim_split_sample: str | None = flag(None, part_of="fim_data")
    """Token between files of a document, each of which is cut by itself."""
    fim_no_prefix: str | None = flag(None, part_of="fim_data")
    """Leave alone what begins with this text."""
    fim_prefix_token: str = flag("<fim_prefix>", part_of="fim_data")
    """Token before the prefix."""
    fim_middle_token: str = flag("<fim_middle>", part_of="fim_data")
    """Token before the middle."""
    fim_suffix_token: str = flag("<fim_suffix>", part_of="fim_data")
    """Token before the suffix."""
    fim_pad_token: str = flag("<fim_pad>", part_of="fim_data")
    """Token that fills a suffix up. One that the vocabulary lacks is the tokenizer's own."""
    fim_eod_token: str = flag("<|endoftext|>", part_of="fim_data")
    """Token between documents. One that the vocabulary lacks is the tokenizer's own."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Which tokenizer, and its files."""

    tokenizer_type: str | None = flag(
        None,
        choices=TOKENIZER_TYPES + OWN_TOKENIZER_TYPES,
        refuse_values={
            "MultimodalTokenizer": _TEXT_ONLY,
            "NullMultimodalTokenizer": "use NullTokenizer",
            "SFTTokenizer": _TEXT_ONLY,
        },
    )
    """Kind of tokenizer."""
    tokenizer_model: str | None = None
    """Model file, or name on the Hugging Face hub."""
    vocab_file: str | None = None
    """Vocabulary of a BPE tokenizer, or of BERT's WordPiece."""
    merge_file: str | None = None
    """Merges of a BPE tokenizer."""
    vocab_size: int | None = None
    """Number of ids of NullTokenizer, or an override of the tokenizer's own."""
    padded_vocab_size: int | None = None
    """Rows of the embedding. Default: padded from the tokenizer's size."""
    vocab_extra_ids: int = 0
    """Sentinels that stand for hidden spans, after the tokenizer's own ids."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """Pattern by which TikToken splits text."""
    tiktoken_num_special_tokens: int = 1000
    """Special tokens of TikToken."""
    chat_template: str | None = flag(None, metavar="FILE")
    """Jinja by which pretrain_vlm.py and the server write conversations. Default that of the
    tokenizer; without one, pretrain_vlm.py puts messages one after the other, and an answer ends
    with the end of document."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out the special tokens with which a Hugging Face tokenizer begins and ends a text."""
    trust_remote_code: bool = False
    """Allow a Hugging Face tokenizer to run its own Python code."""
