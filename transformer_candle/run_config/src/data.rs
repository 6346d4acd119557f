//! `data`: the training text, and how it is batched.

mod automatic;

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::automatic::{BatchSize, Bos, NumWorkers};

use crate::{ByteSize, MixtureComponent, TimeSpan};

/// The newest version of the rules by which files become documents ([`DataConfig::reading_version`]).
pub const NEWEST_READING_VERSION: u32 = 2;
/// The version of these rules in runs that recorded none.
pub const FIRST_READING_VERSION: u32 = 1;

/// The value of [`DataConfig::chat_template`] that stands for the built-in ChatML template.
pub const CHATML: &str = "chatml";
/// The value of [`DataConfig::chat_template`] that stands for the built-in training template of Qwen3.
pub const QWEN3: &str = "qwen3";

/// The names of all built-in templates.
pub const BUILT_IN_TEMPLATES: [&str; 2] = [CHATML, QWEN3];

/// Whether the value of [`DataConfig::chat_template`] is the name of a built-in template, not a path.
pub fn is_built_in_template(template: &Path) -> bool {
    BUILT_IN_TEMPLATES.iter().any(|name| template == Path::new(name))
}

/// The training text, and how it is batched. With a `streaming_config.json` beside the config the
/// text is streamed from the Hugging Face Hub, and `train_shards` is ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DataConfig {
    /// Local text to train on: files, folders or globs of `.parquet`, `.jsonl` or `.json` (also `.gz`, `.zst`)
    /// and `.txt`. Of a folder the files of one split are read (`split`).
    pub train_shards: Vec<String>,
    /// The split of the folders in `train_shards`, by their files' names as on the Hub (`data/test-00000-of-00001.parquet`
    /// is of the split `test`). Default: `train`, or without one all files that are in no validation or test split.
    pub split: Option<String>,
    /// Use only the first rows of `train_shards`, this many, repeated as epochs. Default: all.
    #[schemars(range(min = 1))]
    pub max_samples: Option<u64>,
    /// Several sources instead, each with its weight: data sets of the Hub and local
    /// files, such as `[{dataset: HuggingFaceFW/fineweb, weight: 0.7}, {shards: [code/*.parquet], weight: 0.3}]`. A
    /// source that ends starts over while the others continue. Needs `scheduler.total_steps`.
    pub mixture: Vec<MixtureComponent>,
    /// Local text to evaluate on, given like `train_shards`. Default: held-out parts of the training
    /// text, see `held_out_fraction`.
    pub validation_shards: Vec<String>,
    /// The column of Parquet files, and the field of JSON lines, that holds the text. When streaming,
    /// that of `streaming_config.json`.
    #[schemars(length(min = 1))]
    pub text_column: String,
    /// What a row is: `text`, or `chat`, a conversation.
    pub format: DataFormat,
    /// The version of the rules by which files become documents: which files of a folder are read, which rows and texts
    /// a file gives, and which tokens and chat templates the files beside a `tokenizer.json` add to it. 1: the rules of
    /// runs that recorded no version. 2: of a folder the files of one split and no descriptions, `<|endoftext|>` in texts
    /// separates documents, `NaN` and `Infinity` in JSON, Alpaca and more ShareGPT rows, what is held out has text, and
    /// corrupted files are skipped (`on_bad_file`). Default: the newest one for a new run, and the one that it was started
    /// with for a resumed run, which cannot change it.
    #[schemars(range(min = 1, max = 2))]
    pub reading_version: Option<u32>,
    /// What happens to a file whose content cannot be decoded: a truncated download, or a file that does not match its
    /// extension. Never to one that cannot be read for another reason, such as the network's or the disk's. Runs
    /// of reading version 1 stop.
    pub on_bad_file: OnBadFile,
    /// The chat template that renders conversations: `chatml`, `qwen3` (Qwen3's, with every thought kept), or a Jinja
    /// file. Default: that of the model's tokenizer (`chat_template.jinja`, else `chat_template` in
    /// `tokenizer_config.json`).
    pub chat_template: Option<PathBuf>,
    /// The day that a chat template takes for today, such as `2026-01-31`. Templates that name the date need it, so that
    /// a run is the same on another day.
    #[schemars(extend("format" = "date"))]
    pub chat_template_date: Option<String>,
    /// Whether the loss counts only what the assistant says, or what a `completion` says; otherwise it counts every
    /// token of a conversation.
    pub assistant_only_loss: bool,
    /// Whether text that spells a special token, such as `<|im_end|>`, becomes that token, as in transformers, instead of
    /// its characters. Default: true for documents of a run that starts from a pretrained model (`model.init_from`), and
    /// for a `prompt` and a `completion` that are texts, which no template renders; false for other documents, and for
    /// messages, whose text cannot end a turn.
    pub parse_special_tokens: Option<bool>,
    /// What happens to a conversation that is longer than `sequence_length`.
    pub overlong_conversations: OverlongConversations,
    /// Tokens of one training sequence. At most `model.max_position_embeddings`.
    #[schemars(range(min = 2, max = 1_048_576))]
    pub sequence_length: usize,
    /// How documents share sequences, and how far attention reaches back in them. Default: `concat`; with
    /// `format: chat`, which knows the other two, `documents`.
    pub packing: Packing,
    /// Whether each document starts with the tokenizer's BOS token. `auto` is what the tokenizer's files say
    /// (`add_bos_token`, else its post-processor), so that a model such as Llama is trained on as it was trained.
    pub bos: Bos,
    /// Sequences of a micro-batch, which are in memory at the same time. `auto` is the largest number
    /// that fits and divides `sequences_per_step`. Default: `sequences_per_step /
    /// gradient_accumulation_steps`, or `auto`.
    pub batch_size: BatchSize,
    /// Micro-batches whose gradients are accumulated for an optimizer step. Default:
    /// `sequences_per_step / batch_size`, or 1.
    #[schemars(range(min = 1, max = 65_536))]
    pub gradient_accumulation_steps: Option<usize>,
    /// Sequences of an optimizer step. Two of this key, `batch_size` and
    /// `gradient_accumulation_steps` determine the third; an `--override` of one of the others keeps
    /// this number. How it is divided changes results by rounding only.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub sequences_per_step: usize,
    /// Tokens of an optimizer step, another spelling of `sequences_per_step`: a multiple of `sequence_length`. `null`:
    /// `sequences_per_step` says it.
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    pub tokens_per_step: Option<usize>,
    /// Documents of the shuffle window. A larger one mixes better and holds more text in memory
    /// (FineWeb: about 3 KB per document). The sources of a mixture share it.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub shuffle_buffer_size: usize,
    /// Threads that read and tokenise ahead of training. `auto` takes as many as the encoder, whose speed is measured
    /// at the start, needs to stay ahead of training. The data order does not depend on it.
    pub num_workers: NumWorkers,
    /// How long a stream may go without a byte from the Hub before the run ends. Training continues with what is
    /// ready meanwhile.
    pub network_patience: TimeSpan,
    /// Cache of the blocks of streamed files, so that a second epoch or a resumed run reads them from
    /// this machine's disk. Default: in the user's cache folder. Several runs may share it.
    pub cache_dir: Option<PathBuf>,
    /// Size of the cache on disk at most; the least recently used blocks are removed. Less than a
    /// block of 512 KiB, such as `1B`, disables it.
    pub cache_limit: ByteSize,
    /// Fraction of the training text's row groups that is held out for evaluation if
    /// `validation_shards` is empty. At least one row group is held out.
    #[schemars(range(max = 0.5), extend("exclusiveMinimum" = 0))]
    pub held_out_fraction: f64,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            train_shards: Vec::new(),
            split: None,
            max_samples: None,
            mixture: Vec::new(),
            validation_shards: Vec::new(),
            text_column: "text".to_owned(),
            format: DataFormat::Text,
            reading_version: None,
            on_bad_file: OnBadFile::Skip,
            chat_template: None,
            chat_template_date: None,
            assistant_only_loss: true,
            parse_special_tokens: None,
            overlong_conversations: OverlongConversations::Truncate,
            sequence_length: 256,
            packing: Packing::Concat,
            bos: Bos::Auto,
            batch_size: BatchSize::Fixed(8),
            gradient_accumulation_steps: Some(1),
            sequences_per_step: 8,
            tokens_per_step: None,
            shuffle_buffer_size: 8192,
            num_workers: NumWorkers::Auto,
            network_patience: TimeSpan(3600),
            cache_dir: None,
            cache_limit: ByteSize(16 << 30),
            held_out_fraction: 0.001,
        }
    }
}

impl DataConfig {
    /// Target tokens of one optimizer step, padding not subtracted.
    pub fn tokens_per_step(&self) -> usize {
        self.sequences_per_step * self.sequence_length
    }

    /// The version of the rules by which files become documents, the newest if none is recorded.
    pub fn reading_version(&self) -> u32 {
        self.reading_version.unwrap_or(NEWEST_READING_VERSION)
    }

    /// Whether files whose content cannot be decoded are skipped.
    pub fn skips_bad_files(&self) -> bool {
        self.on_bad_file == OnBadFile::Skip && self.reading_version() > FIRST_READING_VERSION
    }
}

/// What happens to a file whose content cannot be decoded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnBadFile {
    /// What can be decoded of it is used, the rest is skipped in all epochs, with a warning and a record in the ledger.
    /// The run ends with exit code 3 once all files are bad, or at least two and more than 5 % of them.
    #[default]
    Skip,
    /// The run ends with exit code 3, after a checkpoint.
    Stop,
}

/// What a row of the training data is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DataFormat {
    /// A document, in `text_column`.
    #[default]
    Text,
    /// A conversation, in the columns that trl's SFTTrainer reads: `messages` (or `conversations`), or `prompt` with
    /// `completion`; also `tools` and `chat_template_kwargs`.
    Chat,
}

/// What happens to a conversation that is longer than a sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OverlongConversations {
    /// Its start is kept.
    #[default]
    Truncate,
    /// It is left out, and counted with the skipped rows.
    Skip,
}

/// Checks that a text is a day, such as `2026-01-31`.
pub(crate) fn check_date(text: &str) -> Result<(), String> {
    let fields: Vec<&str> = text.split('-').collect();
    let in_range = |field: &str, digits: usize, most: u32| {
        let number = field.parse::<u32>().ok().filter(|_| field.bytes().all(|byte| byte.is_ascii_digit()));
        field.len() == digits && number.is_some_and(|number| (1..=most).contains(&number))
    };
    match fields.as_slice() {
        [year, month, day] if in_range(year, 4, 9999) && in_range(month, 2, 12) && in_range(day, 2, 31) => Ok(()),
        _ => Err("must be a day such as 2026-01-31".to_owned()),
    }
}

/// How documents share sequences, and how far attention reaches back in them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Documents end to end, and attention to the start of the sequence: across `<|endoftext|>` into the documents
    /// before.
    #[default]
    Concat,
    /// Documents end to end, and attention to the `<|endoftext|>` before the document, from which its first token is
    /// predicted; with `bos` to the BOS that starts the document. The pieces of at most 64 KiB in which a `.txt` file is shuffled have none between them and
    /// are not separated.
    ///
    /// Conversations are put into sequences as a whole, so that few positions are left empty.
    Documents,
    /// One conversation per sequence; the rest of it is padding, which the loss ignores.
    Padded,
}
