//! Files that are not read: what they are, and what to do to read them.

use std::collections::BTreeMap;
use std::path::Path;

use crate::formats::Format;
use crate::hub::is_metadata;

/// Names, without extension, of files that describe a data set.
const DOCUMENTATION: [&str; 7] = ["license", "licence", "copying", "notice", "readme", "citation", "changelog"];
const COMPRESSIONS: [&str; 4] = ["gz", "zst", "bz2", "xz"];
/// What to do with files of other formats, by extension.
const CONVERSIONS: [(&[&str], &str); 8] = [
    (&["csv", "csv.gz"], "convert them, as with `pandas.read_csv(PATH).to_parquet(PATH)`"),
    (&["tsv", "tsv.gz"], r"convert them, as with `pandas.read_csv(PATH, sep='\t').to_parquet(PATH)`"),
    (&["xls", "xlsx"], "convert them, as with `pandas.read_excel(PATH).to_parquet(PATH)`"),
    (&["arrow", "feather"], "convert them, as with `datasets.Dataset.from_file(PATH).to_parquet(PATH)`"),
    (&["zip"], "unpack them with `unzip`"),
    (&["tar", "tar.gz", "tgz", "tar.zst", "tar.bz2", "tar.xz"], "unpack them with `tar -xf`"),
    (&["txt.gz"], "decompress them with `gunzip`"),
    (&["txt.zst"], "decompress them with `unzstd`"),
];

/// Files that are not read, counted by extension.
#[derive(Default)]
pub(super) struct PassedOver {
    kinds: BTreeMap<String, Kind>,
    documentation: Vec<String>,
}

struct Kind {
    files: u64,
    conversion: Option<&'static str>,
}

impl PassedOver {
    pub(super) fn add(&mut self, path: &Path) {
        if is_documentation(path) {
            self.documentation.push(name_of(path));
            return;
        }
        let extension = extension(path);
        let name = extension.as_ref().map_or("without extension".to_owned(), |extension| format!(".{extension}"));
        let conversion = || match Format::of_named_text(path) {
            Some(_) => Some("name them in a pattern such as `**/*.py` to read them as text"),
            None => extension.and_then(|extension| conversion(&extension)),
        };
        self.kinds.entry(name).or_insert_with(|| Kind { files: 0, conversion: conversion() }).files += 1;
    }

    /// Returns a sentence about the files of a pattern that are left out; `None` if there are none.
    pub(super) fn note(mut self, pattern: &str) -> Option<String> {
        let kinds = self.describe();
        self.documentation.sort();
        let documentation = match self.documentation.as_slice() {
            [] => String::new(),
            [name] => format!("{name} (a description)"),
            names => format!("{} (descriptions)", names.join(", ")),
        };
        let parts: Vec<String> = [kinds, documentation].into_iter().filter(|part| !part.is_empty()).collect();
        let files = self.kinds.values().map(|kind| kind.files).sum::<u64>() + self.documentation.len() as u64;
        let files = if files == 1 { "1 file is".to_owned() } else { format!("{files} files are") };
        (!parts.is_empty()).then(|| format!("{files} passed over in {pattern}: {}", parts.join(", ")))
    }

    /// Says why a folder has nothing to read, as a predicate of its name.
    pub(super) fn problem(&self, folder: &Path) -> String {
        if self.kinds.contains_key(".arrow") {
            let files = self.documentation.iter().map(String::as_str);
            if files.clone().any(|name| matches!(name, "state.json" | "dataset_info.json" | "dataset_dict.json")) {
                return format!(
                    "is a data set in Arrow files, as save_to_disk writes it: convert it, as with \
                     `datasets.load_from_disk(\"{}\").to_parquet(\"data.parquet\")`",
                    folder.display()
                );
            }
        }
        match self.describe() {
            kinds if kinds.is_empty() => "contains no file of a supported format".to_owned(),
            kinds => format!("contains no file of a supported format, but {kinds}"),
        }
    }

    fn describe(&self) -> String {
        let descriptions = self.kinds.iter().map(|(name, Kind { files, conversion })| {
            let conversion = conversion.map_or_else(String::new, |conversion| format!(" ({conversion})"));
            format!("{files} {name}{conversion}")
        });
        descriptions.collect::<Vec<_>>().join(", ")
    }
}

/// Says why a file that was named cannot be read, as a predicate of its name.
pub(super) fn describe_file(path: &Path) -> String {
    let conversion = extension(path).and_then(|extension| conversion(&extension));
    let conversion =
        conversion.map_or_else(String::new, |conversion| format!(" ({})", conversion.replace("them", "it")));
    format!("is not of a supported format{conversion}")
}

/// Whether a file describes a data set and is no part of it: metadata of the Hub, a license or a readme.
pub(super) fn is_documentation(path: &Path) -> bool {
    let name = name_of(path);
    let stem = name.split('.').next().unwrap_or(&name).to_ascii_lowercase();
    let is_document = DOCUMENTATION
        .iter()
        .any(|word| stem.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '_'])));
    let is_data = matches!(Format::from_path(path), Some(Format::Parquet | Format::Jsonl(_))) && name != "state.json";
    is_metadata(&name) || name == "state.json" || (is_document && !is_data)
}

/// Whether the last part of a pattern spells a file's extension.
pub(super) fn names_extension(pattern: &str, path: &Path) -> bool {
    let last = pattern.rsplit('/').next().unwrap_or(pattern);
    let words =
        last.split(|character: char| !character.is_ascii_alphanumeric() && character != '_' && character != '+');
    let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
    extension.is_some_and(|extension| words.skip(1).any(|word| word == extension))
}

/// The extension in lower case, with the one before it where it is that of a compression.
fn extension(path: &Path) -> Option<String> {
    let name = name_of(path).to_ascii_lowercase();
    let (stem, last) = name.rsplit_once('.')?;
    match stem.rsplit_once('.') {
        Some((_, inner)) if COMPRESSIONS.contains(&last) => Some(format!("{inner}.{last}")),
        _ => Some(last.to_owned()),
    }
}

fn conversion(extension: &str) -> Option<&'static str> {
    CONVERSIONS.iter().find(|(extensions, _)| extensions.contains(&extension)).map(|(_, conversion)| *conversion)
}

fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_counted_by_kind_with_a_way_out() {
        let mut passed_over = PassedOver::default();
        for name in ["b.csv", "a.CSV", "x.txt.gz", "n.py", "Makefile", "LICENSE.txt", "README.md", "dataset_infos.json"]
        {
            passed_over.add(Path::new(name));
        }
        let note = passed_over.note("folder").unwrap();
        let parts = [
            "8 files are passed over in folder: 2 .csv (convert them, as with `pandas.read_csv(PATH).to_parquet(PATH)`)",
            "1 .py (name them in a pattern",
            "1 .txt.gz (decompress them with `gunzip`)",
            "1 without extension",
            "LICENSE.txt, README.md, dataset_infos.json (descriptions)",
        ];
        assert!(parts.iter().all(|part| note.contains(part)), "{note}");
        assert_eq!(PassedOver::default().note("folder"), None);
    }

    #[test]
    fn folders_of_save_to_disk_are_recognised() {
        let mut passed_over = PassedOver::default();
        for name in ["data-00000-of-00001.arrow", "state.json", "dataset_info.json"] {
            passed_over.add(Path::new(name));
        }
        let problem = passed_over.problem(Path::new("/texts"));
        assert!(problem.contains("save_to_disk") && problem.contains("load_from_disk(\"/texts\")"), "{problem}");
    }

    #[test]
    fn documentation_is_told_from_data() {
        for name in
            ["LICENSE", "license.txt", "LICENSE-MIT.txt", "README.md", "README.txt", "dataset_infos.json", "state.json"]
        {
            assert!(is_documentation(Path::new(name)), "{name}");
        }
        for name in ["licenses.txt", "license.jsonl", "readme_rows.parquet", "notices.json", "a.txt"] {
            assert!(!is_documentation(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn patterns_name_extensions_in_their_last_part() {
        let is_named = |pattern: &str| names_extension(pattern, Path::new("/src/a.py"));
        assert!(["**/*.py", "*.{rs,py}", "src/a*.py", "[ab].py"].into_iter().all(is_named));
        assert!(!["**/*", "*", "py/*", "*.*", "*.p?", "py*", "*.pyi"].into_iter().any(is_named));
    }
}
