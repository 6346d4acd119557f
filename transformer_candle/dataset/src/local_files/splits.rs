//! The split of a folder: a data set downloaded from the Hub has training, validation and test files in one folder.

use std::collections::HashSet;
use std::path::Path;

use super::DataFile;
use crate::DataError;
use crate::hub::{FolderFiles, infer_folder_splits};

const TRAIN: &str = "train";
const VALIDATION: &str = "validation";
const TEST: &str = "test";

/// Which files of a folder are read, by the splits that the Hub's rules find in their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FolderSplit {
    /// `train`, else all that are in no validation or test split.
    Train,
    /// `validation`, else `test`, else all.
    Validation,
    /// The split of this name.
    Named(String),
}

impl FolderSplit {
    /// Returns the split of training data: the one of this name, by default `train`.
    pub fn of_training(name: Option<&str>) -> Self {
        name.map_or(Self::Train, |name| Self::Named(name.to_owned()))
    }

    /// Keeps the files of a folder that are in the split; notes how many are in others.
    pub(super) fn choose(
        &self,
        pattern: &str,
        folder: &Path,
        files: Vec<DataFile>,
        notes: &mut Vec<String>,
    ) -> Result<Vec<DataFile>, DataError> {
        let name = |file: &DataFile| {
            let path = &file.file.path;
            path.strip_prefix(folder).unwrap_or(path).to_string_lossy().replace('\\', "/")
        };
        let splits = infer_folder_splits(&files.iter().map(name).collect::<Vec<_>>());
        let has = |name: &str| splits.iter().find(|split| split.name == name);
        let is_held_aside = |split: &&FolderFiles| [VALIDATION, TEST].contains(&split.name.as_str());
        let all = |split: &FolderFiles| split.files.iter().copied().collect::<HashSet<usize>>();
        let (chosen, description) = match self {
            Self::Named(name) => (has(name).map(all).unwrap_or_default(), name.as_str()),
            Self::Train if has(TRAIN).is_none() => {
                let held_aside: HashSet<usize> = splits.iter().filter(is_held_aside).flat_map(all).collect();
                ((0..files.len()).filter(|file| !held_aside.contains(file)).collect(), TRAIN)
            }
            Self::Train => (has(TRAIN).map(all).unwrap_or_default(), TRAIN),
            Self::Validation => match has(VALIDATION).or_else(|| has(TEST)) {
                Some(split) => (all(split), split.name.as_str()),
                None => return Ok(files),
            },
        };
        if chosen.is_empty() {
            let available = splits.iter().map(|split| split.name.clone()).collect();
            return Err(DataError::Split { name: pattern.to_owned(), split: description.to_owned(), available });
        }
        if chosen.len() < files.len() {
            notes.push(describe(pattern, description, chosen.len(), &splits, files.len()));
        }
        let keep = |(index, file): (usize, DataFile)| chosen.contains(&index).then_some(file);
        Ok(files.into_iter().enumerate().filter_map(keep).collect())
    }
}

/// Says which files of a folder are read, and which are not.
fn describe(pattern: &str, chosen: &str, read: usize, splits: &[FolderFiles], files: usize) -> String {
    let count = |files: usize| if files == 1 { "1 file".to_owned() } else { format!("{files} files") };
    let others = splits.iter().filter(|split| split.name != chosen);
    let mut left_out: Vec<String> =
        others.map(|split| format!("{} ({})", split.name, count(split.files.len()))).collect();
    let in_splits = splits.iter().flat_map(|split| &split.files).collect::<HashSet<_>>().len();
    if splits.iter().any(|split| split.name == chosen) && in_splits < files {
        left_out.push(format!("{} in no split", count(files - in_splits)));
    }
    format!(
        "{pattern} has splits: {chosen} ({}) is read, not {}; --split chooses (data.split)",
        count(read),
        left_out.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::FoundPath;
    use super::*;
    use crate::formats::Format;

    fn chosen(split: &FolderSplit, names: &[&str]) -> Result<(Vec<String>, Vec<String>), DataError> {
        let file = |name: &&str| {
            let path = PathBuf::from("/data").join(name);
            let file = FoundPath { canonical: path.clone(), path, linked: false };
            DataFile { file, format: Format::Text }
        };
        let mut notes = Vec::new();
        let files = split.choose("/data", Path::new("/data"), names.iter().map(file).collect(), &mut notes)?;
        let name = |file: DataFile| file.file.path.strip_prefix("/data").unwrap().to_string_lossy().into_owned();
        Ok((files.into_iter().map(name).collect(), notes))
    }

    const SHARDS: [&str; 3] = [
        "data/test-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet",
        "data/validation-00000-of-00001.parquet",
    ];

    #[test]
    fn the_training_files_of_a_downloaded_data_set_are_read() {
        let (files, notes) = chosen(&FolderSplit::Train, &SHARDS).unwrap();
        assert_eq!(files, [SHARDS[1]]);
        assert_eq!(
            notes,
            [
                "/data has splits: train (1 file) is read, not validation (1 file), test (1 file); --split chooses (data.split)"
            ]
        );
        assert_eq!(chosen(&FolderSplit::Named("test".to_owned()), &SHARDS).unwrap().0, [SHARDS[0]]);
        assert_eq!(chosen(&FolderSplit::Validation, &SHARDS).unwrap().0, [SHARDS[2]]);
        let message = chosen(&FolderSplit::Named("dev".to_owned()), &SHARDS).unwrap_err().to_string();
        assert!(message.contains("no split `dev`") && message.contains("train, validation, test"), "{message}");
    }

    #[test]
    fn a_folder_without_splits_is_read_whole() {
        let names = ["a.jsonl", "b.jsonl", "sub/c.jsonl"];
        for split in [FolderSplit::Train, FolderSplit::Validation, FolderSplit::Named("train".to_owned())] {
            let (files, notes) = chosen(&split, &names).unwrap();
            assert_eq!((files.len(), notes.len()), (3, 0), "{split:?}");
        }
    }

    #[test]
    fn files_beside_a_test_split_are_training_files() {
        let (files, notes) = chosen(&FolderSplit::Train, &["a.jsonl", "b.jsonl", "test.jsonl"]).unwrap();
        assert_eq!(files, ["a.jsonl", "b.jsonl"]);
        assert!(notes[0].contains("not test (1 file)"), "{notes:?}");
        assert!(matches!(chosen(&FolderSplit::Train, &["test.jsonl"]), Err(DataError::Split { .. })));
        let (files, notes) = chosen(&FolderSplit::Train, &["a.jsonl", "train.jsonl"]).unwrap();
        assert_eq!(files, ["train.jsonl"]);
        assert!(notes[0].contains("1 file in no split"), "{notes:?}");
    }
}
