//! `data.mixture`: several sources of text with weights.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One source of a mixture: a data set of the Hugging Face Hub, or local files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MixtureComponent {
    /// A data set of the Hub (`owner/name`), or `demo`. Either this or `shards`.
    #[serde(default)]
    pub dataset: Option<String>,
    /// The data set's configuration, such as `sample-10BT`. Default: that of the data set.
    #[serde(default)]
    pub config: Option<String>,
    /// The data set's split, or that of folders in `shards`. Default: `train`.
    #[serde(default)]
    pub split: Option<String>,
    /// The data set's commit, branch or tag. Default: the newest commit. A run keeps its first commit.
    #[serde(default)]
    pub revision: Option<String>,
    /// Local text, given like `data.train_shards`. Either this or `dataset`.
    #[serde(default)]
    pub shards: Vec<String>,
    /// The column or field that holds the text. Default: `data.text_column`.
    #[serde(default)]
    pub text_column: Option<String>,
    /// A name by which `stages[].mixture` refers to it. Default: `dataset`.
    #[serde(default)]
    pub name: Option<String>,
    /// Mixture weight: divided by the sum of all weights, the source's fraction of the sequences, and of the
    /// tokens, as sequences have one length.
    #[schemars(range(max = 1e12), extend("exclusiveMinimum" = 0))]
    pub weight: f64,
}

impl MixtureComponent {
    /// The data set's split.
    pub fn split(&self) -> &str {
        self.split.as_deref().unwrap_or("train")
    }
}
