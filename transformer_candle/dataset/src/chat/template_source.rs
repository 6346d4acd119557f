//! Where a run's chat templates come from: a built-in one, a file, or the model's tokenizer.

use std::path::Path;

use run_config::system_error::in_words;
use run_config::{
    CHATML, DEFAULT_TEMPLATE, FIRST_READING_VERSION, NamedTemplate, QWEN3, TokenizerFolder, regular_file,
};

use super::special_tokens::SpecialTokens;
use super::{ChatSettings, TOOL_TEMPLATE};
use crate::{DataError, DocumentTokens};

const CHATML_TEMPLATE: &str = include_str!("chatml.jinja");
const QWEN3_TEMPLATE: &str = include_str!("qwen3.jinja");
/// The token that ends a turn in the built-in templates.
const TURN_END: &str = "<|im_end|>";

/// The templates of a run.
pub(super) struct Templates {
    /// The default one; `None` if the model has none.
    pub default: Option<NamedTemplate>,
    /// The one of conversations with tools, where the model has one of their own.
    pub of_tools: Option<NamedTemplate>,
    /// The source of the default one for inference, if it is another: the model's own where that of training only adds
    /// marks.
    pub inference: Option<String>,
}

/// Finds a run's templates.
pub(super) fn find_templates(
    settings: &ChatSettings,
    folder: &TokenizerFolder,
    special_tokens: &SpecialTokens,
    marks: &DocumentTokens,
) -> Result<Templates, DataError> {
    let own = || folder.templates.first().cloned();
    let Some(name) = &settings.template else {
        let of_tools = folder.templates.iter().find(|template| template.name == TOOL_TEMPLATE);
        return Ok(Templates { default: own(), of_tools: of_tools.cloned(), inference: None });
    };
    let source = match name.to_str() {
        Some(CHATML) => built_in(CHATML_TEMPLATE, settings, special_tokens, marks),
        Some(QWEN3) => built_in(QWEN3_TEMPLATE, settings, special_tokens, marks),
        _ => read(name)?,
    };
    let inference = own().filter(|_| name == Path::new(QWEN3)).map(|template| template.source);
    let default = NamedTemplate { name: DEFAULT_TEMPLATE.to_owned(), origin: name.clone(), source };
    Ok(Templates { default: Some(default), of_tools: None, inference })
}

/// Returns a built-in template with the tokens of the model.
fn built_in(template: &str, settings: &ChatSettings, special_tokens: &SpecialTokens, marks: &DocumentTokens) -> String {
    let mut template = template.trim_end().to_owned();
    if special_tokens.named(TURN_END).is_none() {
        // The end of a turn must be a token that generation can stop at.
        template = template.replace(TURN_END, &marks.end_of_text.name);
    }
    let bos = marks.bos.as_ref().filter(|_| marks.starts_with_bos && settings.reading_version > FIRST_READING_VERSION);
    if let Some(bos) = bos {
        // As a model's own template does whose texts start with BOS.
        let literal = bos.name.replace('\\', "\\\\").replace('\'', "\\'");
        template = format!("{{{{- '{literal}' }}}}\n{template}");
    }
    template
}

fn read(path: &Path) -> Result<String, DataError> {
    let refused = |message: String| DataError::ChatTemplate { path: path.to_owned(), message };
    let bytes = regular_file::read(path).map_err(|error| refused(in_words(&error)))?;
    String::from_utf8(bytes).map_err(|_| refused("it is not UTF-8".to_owned()))
}
