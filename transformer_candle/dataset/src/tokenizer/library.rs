//! Calls of the tokenizers library, which panics on some values of a `tokenizer.json`: a prefix that is longer than a
//! piece, a character map that is none, a decoder that strips more than there is.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use serde_json::Value;
use tokenizers::Tokenizer;

/// Ids of a tokenizer; each is a row of tables, and of a model's embedding.
const MAX_IDS: u64 = 1 << 24;

thread_local! {
    /// Whether this thread is in a call of the library, whose panics are reported as errors.
    static IS_IN_LIBRARY: Cell<bool> = const { Cell::new(false) };
}

/// Calls the library; a panic becomes an error's text.
pub(crate) fn call<T>(library: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    static SILENCE: Once = Once::new();
    SILENCE.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !IS_IN_LIBRARY.get() {
                report(panic);
            }
        }));
    });
    let was_in_library = IS_IN_LIBRARY.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(library));
    IS_IN_LIBRARY.set(was_in_library);
    match result {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("the tokenizers library fails on a value in it: {}", reason(panic.as_ref()))),
    }
}

fn reason(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it gives no reason")
}

/// Reads a `tokenizer.json`, which is also given parsed; its truncation and padding are left out.
pub(crate) fn load(content: &[u8], json: &Value) -> Result<Tokenizer, String> {
    if let Some(problem) = problem(json) {
        return Err(problem);
    }
    call(|| {
        let mut tokenizer = Tokenizer::from_bytes(content)?;
        tokenizer.with_truncation(None)?;
        tokenizer.with_padding(None);
        Ok(tokenizer)
    })
}

/// Returns what is wrong with a `tokenizer.json` whose values the library does not check.
fn problem(json: &Value) -> Option<String> {
    let model = &json["model"];
    if let Some(prefix) = model["continuing_subword_prefix"].as_str().filter(|prefix| !prefix.is_empty()) {
        let merges = model["merges"].as_array().into_iter().flatten();
        let mut second_parts = merges.filter_map(|merge| match merge {
            Value::String(pair) => pair.split_once(' ').map(|(_, second)| second),
            pair => pair[1].as_str(),
        });
        if let Some(second) = second_parts.find(|second| !second.starts_with(prefix)) {
            return Some(format!(
                "its model.continuing_subword_prefix is `{prefix}`, and a merge joins `{second}`, which does not start \
                 with it: set the prefix to null"
            ));
        }
    }
    let tokens = json["added_tokens"].as_array().into_iter().flatten();
    let added = tokens.filter_map(|token| Some((token["content"].as_str()?, token["id"].as_u64()?)));
    let vocabulary = model["vocab"].as_object().into_iter().flatten();
    let own = vocabulary.filter_map(|(token, id)| Some((token.as_str(), id.as_u64()?)));
    let (token, id) = added.chain(own).find(|(_, id)| *id >= MAX_IDS)?;
    Some(format!("its token `{token}` has the id {id}, and ids are below {MAX_IDS}"))
}
