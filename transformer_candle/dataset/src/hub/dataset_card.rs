//! The YAML front matter of a dataset card (`README.md`): the configs, and the files of each split.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::DataError;

/// One config: a named set of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CardConfig {
    pub name: String,
    /// Whether this config is used when none is requested.
    pub default: bool,
    /// The folder that patterns are relative to; empty for the root of the repository.
    pub folder: String,
    /// Patterns by split, in the card's order; `None` if they follow from the file names.
    pub splits: Option<Vec<SplitPatterns>>,
}

/// The files of a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SplitPatterns {
    pub split: String,
    pub patterns: Vec<String>,
}

#[derive(Deserialize)]
struct DatasetCard {
    #[serde(default)]
    configs: Option<Vec<Config>>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(rename = "config_name")]
    name: Option<String>,
    #[serde(default)]
    default: bool,
    data_dir: Option<String>,
    data_files: Option<DataFiles>,
}

/// The key `data_files`: `path`, `[path, ...]`, `[{split, path}, ...]` or `{split: path}`.
#[derive(Deserialize)]
#[serde(untagged)]
enum DataFiles {
    Paths(Paths),
    Entries(Vec<Entry>),
    BySplit(BTreeMap<String, Paths>),
}

#[derive(Deserialize)]
struct Entry {
    split: String,
    path: Paths,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Paths {
    One(String),
    Many(Vec<String>),
}

/// The configs of a dataset card; empty if it has none.
pub(super) fn parse(dataset: &str, readme: &str) -> Result<Vec<CardConfig>, DataError> {
    let Some(front_matter) = front_matter(readme) else {
        return Ok(Vec::new());
    };
    let options = serde_saphyr::options! { duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins };
    let card: DatasetCard = serde_saphyr::from_str_with_options(front_matter, options)
        .map_err(|error| DataError::DatasetCard { name: dataset.to_owned(), message: error.to_string() })?;
    let configs = card.configs.unwrap_or_default();
    Ok(configs
        .into_iter()
        .map(|config| CardConfig {
            name: config.name.unwrap_or_else(|| "default".to_owned()),
            default: config.default,
            folder: config.data_dir.unwrap_or_default().trim_matches('/').to_owned(),
            splits: config.data_files.map(DataFiles::by_split),
        })
        .collect())
}

/// The text between the first two lines of three dashes.
fn front_matter(readme: &str) -> Option<&str> {
    let text = readme.trim_start_matches('\u{feff}').trim_start();
    let body = text.strip_prefix("---")?;
    let body = body.strip_prefix("\r\n").or_else(|| body.strip_prefix('\n'))?;
    if body.starts_with("---") {
        return None;
    }
    body.find("\n---").map(|end| &body[..=end])
}

impl DataFiles {
    fn by_split(self) -> Vec<SplitPatterns> {
        match self {
            Self::Paths(paths) => vec![SplitPatterns { split: "train".to_owned(), patterns: paths.patterns() }],
            Self::Entries(entries) => {
                let mut splits: Vec<SplitPatterns> = Vec::new();
                for Entry { split, path } in entries {
                    match splits.iter_mut().find(|entry| entry.split == split) {
                        Some(entry) => entry.patterns.extend(path.patterns()),
                        None => splits.push(SplitPatterns { split, patterns: path.patterns() }),
                    }
                }
                splits
            }
            Self::BySplit(splits) => {
                splits.into_iter().map(|(split, paths)| SplitPatterns { split, patterns: paths.patterns() }).collect()
            }
        }
    }
}

impl Paths {
    fn patterns(self) -> Vec<String> {
        match self {
            Self::One(pattern) => vec![pattern],
            Self::Many(patterns) => patterns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(yaml: &str) -> Vec<CardConfig> {
        parse("o/n", &format!("---\nlicense: mit\n{yaml}\n---\n# Title\n---\n")).unwrap()
    }

    fn splits(config: &CardConfig) -> Vec<(&str, Vec<&str>)> {
        let splits = config.splits.as_ref().unwrap();
        splits.iter().map(|s| (s.split.as_str(), s.patterns.iter().map(String::as_str).collect())).collect()
    }

    #[test]
    fn all_forms_of_data_files_are_parsed() {
        let configs = card(
            "configs:\n- config_name: a\n  data_files: data/*.parquet\n- config_name: b\n  data_files: [x.jsonl, 'y/**']\n\
             - config_name: c\n  default: true\n  data_files:\n  - split: train\n    path: t/*\n  - split: test\n    path: [e1, e2]\n  - split: train\n    path: more/*\n\
             - config_name: d\n  data_dir: /sub/\n- config_name: e\n  data_files:\n    validation: v.txt\n    train: [t.txt]\n",
        );
        assert_eq!(configs.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["a", "b", "c", "d", "e"]);
        assert_eq!(splits(&configs[0]), [("train", vec!["data/*.parquet"])]);
        assert_eq!(splits(&configs[1]), [("train", vec!["x.jsonl", "y/**"])]);
        assert_eq!(splits(&configs[2]), [("train", vec!["t/*", "more/*"]), ("test", vec!["e1", "e2"])]);
        assert!(configs[2].default && configs[3].splits.is_none());
        assert_eq!(configs[3].folder, "sub");
        assert_eq!(splits(&configs[4]), [("train", vec!["t.txt"]), ("validation", vec!["v.txt"])]);
    }

    #[test]
    fn a_card_without_configs_has_none() {
        for readme in
            ["", "# Title", "---\nlicense: mit\n---\n", "---\n---\n", "---\nconfigs: null\n---\n", "---\nopen"]
        {
            assert_eq!(parse("o/n", readme).unwrap(), [], "{readme:?}");
        }
    }

    #[test]
    fn invalid_yaml_errors_name_the_data_set() {
        let error = parse("o/n", "---\nconfigs: [}\n---\n").unwrap_err();
        assert!(error.to_string().contains("README.md") && error.to_string().contains("o/n"), "{error}");
    }

    #[test]
    fn a_card_with_a_thousand_configs_is_parsed() {
        let configs: String = (0..1500)
            .map(|i| format!("- config_name: c{i}\n  data_files:\n  - split: train\n    path: data/c{i}/*.parquet\n"))
            .collect();
        assert_eq!(card(&format!("configs:\n{configs}")).len(), 1500);
    }
}
