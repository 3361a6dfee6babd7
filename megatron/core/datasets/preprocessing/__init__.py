"""From text to token files, on one machine or many.

    inputs          the files, their formats, and the part that belongs to one shard
    units           files as bytes, cut into pieces of about a megabyte
    documents       lines and rows into documents, with every fault named
    transforms      fill in the middle, sentences
    chat_template, _template_sandbox  conversations as text, rendered in a process with limits
    encoder         the documents of a unit into token arrays; conversations also into loss masks
    unfinished      the files written so far, and their final names
    stats           counts, progress lines
    flags           the command line, and which shards a process works on
    job             one run: units through worker processes; begins or continues

Nothing here imports torch, the model or a collective: a worker starts in a fraction of a second.
"""
