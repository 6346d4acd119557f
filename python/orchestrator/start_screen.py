"""What `orchestrate` prints when nothing is asked of it."""

TEXT = """\
Pre-train and fine-tune Llama-style language models, on a GPU or a CPU. A run
that is stopped at any moment resumes where it was.

Train
  orchestrate --dataset demo --experiment demo
      a small model on Python sources of this machine, in a few minutes
  orchestrate --input book.txt --experiment book
      your own text: .txt, .jsonl and .parquet files, folders, patterns
  orchestrate --dataset HuggingFaceFW/fineweb --experiment first
      a data set of the Hugging Face Hub, streamed
  orchestrate finetune --model OWNER/NAME --input chats.jsonl --lora-rank 16
      a pretrained model, on conversations

Look
  orchestrate watch                     a run as it trains, or the last one
  orchestrate runs                      all runs: state, step, loss, size, age
  orchestrate generate demo --prompt 'def '
  orchestrate doctor                    can this machine train, and on what

  orchestrate --help                    commands and common options
  orchestrate --help-all                every option
  orchestrate COMMAND --help            those of one command
"""
