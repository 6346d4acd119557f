//! `data.mixture`: several sources of text, each with its share.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One source of a mixture: a data set of the Hugging Face Hub, or local files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MixtureComponent {
    /// A data set of the Hub (`owner/name`), or `demo`. Either this or `shards`.
    #[serde(default)]
    pub dataset: Option<String>,
    /// The data set's configuration, such as `sample-10BT`. Left out: its default one.
    #[serde(default)]
    pub config: Option<String>,
    /// The data set's split. Left out: `train`.
    #[serde(default)]
    pub split: Option<String>,
    /// The data set's commit, branch or tag. Left out: the newest commit. A run keeps the commit that it began with.
    #[serde(default)]
    pub revision: Option<String>,
    /// Local text, written like `data.train_shards`. Either this or `dataset`.
    #[serde(default)]
    pub shards: Vec<String>,
    /// The column or field that holds the text. Left out: `data.text_column`.
    #[serde(default)]
    pub text_column: Option<String>,
    /// The source's share of the training sequences, in proportion to the sum of all weights. Sequences have one
    /// length, so it is its share of the tokens as well.
    #[schemars(range(max = 1e12), extend("exclusiveMinimum" = 0))]
    pub weight: f64,
}

impl MixtureComponent {
    /// The data set's split.
    pub fn split(&self) -> &str {
        self.split.as_deref().unwrap_or("train")
    }
}
