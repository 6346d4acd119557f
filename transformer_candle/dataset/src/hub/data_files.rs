//! The files of a split, resolved as the `datasets` library does: by the configs of the dataset card, else by names
//! like `data/train-00000-of-00001.parquet`, else by folders named after a split, else by file names; else all files
//! are `train`.

use globset::{GlobBuilder, GlobMatcher};

use super::dataset_card::{self, CardConfig, SplitPatterns};
use crate::DataError;
use crate::formats::Format;

/// A file and its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedFile {
    pub path: String,
    pub bytes: u64,
}

/// Words that name a split in a file or folder name.
const SPLIT_WORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Returns the files of `split`, in the order of its patterns, those of one pattern sorted by path. `list` lists every
/// file below a folder.
pub(super) fn resolve(
    dataset: &str,
    readme: Option<&str>,
    config: Option<&str>,
    split: &str,
    mut list: impl FnMut(&str) -> Result<Vec<ListedFile>, DataError>,
) -> Result<Vec<ListedFile>, DataError> {
    let configs = readme.map_or(Ok(Vec::new()), |readme| dataset_card::parse(dataset, readme))?;
    let config = resolve_config(dataset, &configs, config)?;
    let title =
        if config.name == "default" { dataset.to_owned() } else { format!("{dataset} (config {})", config.name) };
    let (splits, listing) = if let Some(splits) = &config.splits {
        (splits.clone(), None)
    } else {
        let listing = list(&config.folder)?;
        (infer_splits(&listing, &config.folder), Some(listing))
    };
    let Some(requested_split) = splits.iter().find(|entry| entry.split == split) else {
        let split = split.to_owned();
        if splits.is_empty() {
            let problem = "the repository contains no file of a supported format".to_owned();
            return Err(DataError::NoHubFiles { name: title, split, problem });
        }
        let available = splits.into_iter().map(|entry| entry.split).collect();
        return Err(DataError::Split { name: title, split, available });
    };
    let mut matching_files = Vec::new();
    for pattern in &requested_split.patterns {
        let pattern = join(&config.folder, pattern);
        let matcher = glob(&pattern)?;
        let listed = match &listing {
            Some(listing) => listing.clone(),
            None => list(literal_folder(&pattern))?,
        };
        matching_files.extend(
            listed.into_iter().filter(|file| matcher.is_match(&file.path) && is_data_file(&file.path, &pattern)),
        );
    }
    keep_main_format(title, requested_split, matching_files)
}

fn resolve_config(
    dataset: &str,
    configs: &[CardConfig],
    requested_config: Option<&str>,
) -> Result<CardConfig, DataError> {
    if configs.is_empty() && requested_config.is_none_or(|requested_config| requested_config == "default") {
        let name = "default".to_owned();
        return Ok(CardConfig { name, default: true, folder: String::new(), splits: None });
    }
    let config = match requested_config {
        Some(requested_config) => configs.iter().find(|config| config.name == requested_config),
        None if configs.len() == 1 => configs.first(),
        None => configs.iter().find(|config| config.default).or_else(|| configs.iter().find(|c| c.name == "default")),
    };
    config.cloned().ok_or_else(|| DataError::Config {
        name: dataset.to_owned(),
        problem: requested_config.map_or("has several configs and no default".to_owned(), |requested_config| {
            format!("has no config `{requested_config}`")
        }),
        available: match configs {
            [] => vec!["default".to_owned()],
            configs => configs.iter().map(|config| config.name.clone()).collect(),
        },
    })
}

/// The splits that the names below `folder` imply, each with the patterns of its files.
fn infer_splits(listing: &[ListedFile], folder: &str) -> Vec<SplitPatterns> {
    let names: Vec<&str> = listing
        .iter()
        .map(|file| file.path.strip_prefix(folder).unwrap_or(&file.path).trim_start_matches('/'))
        .filter(|path| is_data_file(path, "") && Format::from_name(path).is_some())
        .collect();
    let matches = |pattern: &String| glob(pattern).is_ok_and(|glob| names.iter().any(|name| glob.is_match(name)));
    let mut sharded: Vec<String> = names.iter().filter_map(|name| split_of_sharded_name(name)).collect();
    sharded.sort_by_key(|split| {
        let rank = SPLIT_WORDS.iter().position(|(word, _)| word == split);
        (rank.unwrap_or(SPLIT_WORDS.len()), split.clone())
    });
    sharded.dedup();
    if !sharded.is_empty() {
        return sharded
            .into_iter()
            .map(|split| SplitPatterns { patterns: vec![format!("data/{split}-{SHARD}*.*")], split })
            .collect();
    }
    for word_patterns in [folder_name_patterns, file_name_patterns] {
        let splits: Vec<SplitPatterns> = SPLIT_WORDS
            .iter()
            .map(|(split, words)| SplitPatterns {
                split: (*split).to_owned(),
                patterns: words.iter().flat_map(|word| word_patterns(word)).collect(),
            })
            .filter(|split| split.patterns.iter().any(matches))
            .collect();
        if !splits.is_empty() {
            return splits;
        }
    }
    let train = SplitPatterns { split: "train".to_owned(), patterns: vec!["**".to_owned()] };
    if names.is_empty() { Vec::new() } else { vec![train] }
}

/// A split of a folder and the indices of its files.
pub(crate) struct FolderFiles {
    pub name: String,
    pub files: Vec<usize>,
}

/// Finds the splits of a folder by the names of its files, relative to it; one split `train` of all if no name tells.
pub(crate) fn infer_folder_splits(names: &[String]) -> Vec<FolderFiles> {
    let listing: Vec<ListedFile> = names.iter().map(|path| ListedFile { path: path.clone(), bytes: 0 }).collect();
    let files = |split: &SplitPatterns| {
        let globs: Vec<(GlobMatcher, &String)> =
            split.patterns.iter().filter_map(|pattern| Some((glob(pattern).ok()?, pattern))).collect();
        let is_in =
            |name: &String| globs.iter().any(|(glob, pattern)| glob.is_match(name) && is_data_file(name, pattern));
        (0..names.len()).filter(|&index| is_in(&names[index])).collect()
    };
    let splits = infer_splits(&listing, "");
    splits.into_iter().map(|split| FolderFiles { files: files(&split), name: split.split }).collect()
}

const SHARD: &str = "[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9]";
/// Characters that separate a split's word from the rest of a name.
const WORD_SEPARATOR: &str = "[._ 0-9-]";

/// Returns the split in a name such as `data/train-00000-of-00001-abc.parquet`.
fn split_of_sharded_name(path: &str) -> Option<String> {
    let name = path.strip_prefix("data/").filter(|name| !name.contains('/'))?;
    let split = glob(&format!("*-{SHARD}*.*")).ok()?.is_match(name).then(|| name.rfind("-of-"))??;
    // `-of-` follows a dash and five digits.
    name.get(..split.checked_sub(6)?).map(str::to_owned)
}

fn folder_name_patterns(word: &str) -> Vec<String> {
    let s = WORD_SEPARATOR;
    vec![
        format!("**/{word}/**"),
        format!("**/{word}{s}*/**"),
        format!("**/*{s}{word}/**"),
        format!("**/*{s}{word}{s}*/**"),
    ]
}

fn file_name_patterns(word: &str) -> Vec<String> {
    let s = WORD_SEPARATOR;
    vec![format!("**/{word}{s}*"), format!("**/*{s}{word}{s}*")]
}

/// Whether a file is data; hidden files, folders starting with `__` and metadata are data only if the pattern names
/// them.
fn is_data_file(path: &str, pattern: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let hidden = |part: &str| part.starts_with('.') || part.starts_with("__");
    let is_named = |part: &str| pattern.split('/').any(|pattern_part| pattern_part == part || hidden(pattern_part));
    (!is_metadata(name) || is_named(name)) && path.split('/').all(|part| !hidden(part) || is_named(part))
}

/// Whether a file of this name describes a data set.
pub(crate) fn is_metadata(name: &str) -> bool {
    matches!(name, "README.md" | "config.json" | "dataset_info.json" | "dataset_infos.json" | "dataset_dict.json")
}

/// Keeps the files of the most frequent format: a split has one format.
fn keep_main_format(
    title: String,
    split: &SplitPatterns,
    files: Vec<ListedFile>,
) -> Result<Vec<ListedFile>, DataError> {
    let mut counts: Vec<(Format, usize)> = Vec::new();
    for format in files.iter().filter_map(|file| Format::from_name(&file.path)) {
        match counts.iter_mut().find(|(other, _)| other.kind() == format.kind()) {
            Some((_, count)) => *count += 1,
            None => counts.push((format, 1)),
        }
    }
    let most = counts.iter().map(|&(_, count)| count).max();
    let Some((kind, _)) = counts.into_iter().find(|&(_, count)| Some(count) == most) else {
        let problem = match files.first() {
            None => format!("no file matches {}", split.patterns.join(", ")),
            Some(file) => format!("{} is not Parquet, JSON Lines or text", file.path),
        };
        return Err(DataError::NoHubFiles { name: title, split: split.split.clone(), problem });
    };
    let mut paths = std::collections::HashSet::new();
    Ok(files
        .into_iter()
        .filter(|file| Format::from_name(&file.path).is_some_and(|format| format.kind() == kind.kind()))
        .filter(|file| file.bytes > 0 && paths.insert(file.path.clone()))
        .collect())
}

fn join(folder: &str, pattern: &str) -> String {
    let pattern = pattern.strip_prefix("./").unwrap_or(pattern).trim_start_matches('/');
    if folder.is_empty() { pattern.to_owned() } else { format!("{folder}/{pattern}") }
}

/// Returns the folder above the first wildcard of a pattern.
fn literal_folder(pattern: &str) -> &str {
    let plain = pattern.find(['*', '?', '[']).unwrap_or(pattern.len());
    pattern[..plain].rfind('/').map_or("", |slash| &pattern[..slash])
}

fn glob(pattern: &str) -> Result<GlobMatcher, DataError> {
    GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()
        .map(|glob| glob.compile_matcher())
        .map_err(|error| DataError::Pattern { pattern: pattern.to_owned(), message: error.kind().to_string() })
}

#[cfg(test)]
mod tests;
