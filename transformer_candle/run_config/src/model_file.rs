//! A file that is named in place of a model's folder.

use std::path::Path;

/// Says what a file is and what to name instead, as a sentence about `path`; `None` if it is no file.
pub fn model_file_problem(path: &Path) -> Option<String> {
    if !path.is_file() {
        return None;
    }
    let name = path.display();
    if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
        return Some(format!(
            "{name} is a GGUF file, which llama.cpp runs and this program does not read: name the folder of the model in \
             Hugging Face's format from which it was made; where there is none, transformers makes one, with \
             `AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME)`, AutoTokenizer alike, and the \
             `save_pretrained(DIR)` of both"
        ));
    }
    let folder = path.canonicalize().ok().and_then(|path| Some(path.parent()?.display().to_string()));
    let folder = folder.map_or_else(String::new, |folder| format!(", {folder}"));
    Some(format!("{name} is a file: name the folder of the model{folder}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_is_named_with_the_way_to_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(model_file_problem(folder.path()), None);
        assert_eq!(model_file_problem(&folder.path().join("none")), None);
        for (name, words) in [("model.GGUF", "llama.cpp runs"), ("model.safetensors", "is a file: name the folder")] {
            let path = folder.path().join(name);
            std::fs::write(&path, "").unwrap();
            assert!(model_file_problem(&path).unwrap().contains(words), "{name}");
        }
    }
}
