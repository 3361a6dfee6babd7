"""From text to token files, on one machine or many.

    inputs      which files, of which format; the share of one shard
    streams     files of every kind as bytes
    units       the input cut into pieces of about a megabyte: the work of one process at a time
    documents   lines and rows into documents, with every fault named
    encoder     the documents of a unit into token arrays
    chat_template, conversations  messages into tokens and a loss mask, packed
    template_process, _template_sandbox  the process in which templates are rendered, with limits
    fill_in_middle  documents cut in three and put together in another order
    workers     units through processes, in order
    resume      what is written so far, the journal beside it, and the final names
    stats       counts, progress lines, the summary
    shards      which part of the input a process works on
    flags       the command line
    length_report  histograms as HTML or PNG
    job         all of them together; what the command line and the cluster executors call

Nothing here imports torch, the model or a collective: a worker starts in a fraction of a second.
"""
