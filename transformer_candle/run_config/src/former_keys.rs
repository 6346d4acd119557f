//! Keys and values of the configs that the first version's guide handed out. What means the same is
//! translated, what never had an effect is accepted with a note, and what would change the training
//! is refused with the reason.

use serde_json::{Map, Value};

use crate::error::Problem;

/// How a former key that has a value is treated.
enum Former {
    /// Dropped without a note if the function returns true, else refused with a message and a suggestion.
    HarmlessIf(fn(&Value) -> bool, &'static str, &'static str),
    /// Dropped with a note.
    Ignored(&'static str),
}

const DROPOUT: &str = "there is no dropout: pre-training sees each text about once, so it would only hurt";
const EPOCHS: &str = "an epoch of a stream has no known number of steps";

const KEYS: [(&str, Former); 8] = [
    ("model.attn_dropout", Former::HarmlessIf(is_zero, DROPOUT, "remove the key or write 0")),
    ("model.residual_dropout", Former::HarmlessIf(is_zero, DROPOUT, "remove the key or write 0")),
    ("model.rope_mode", Former::HarmlessIf(is_rope_mode, "rotary positions are always on", "remove the key")),
    (
        "scheduler.max_lr",
        Former::HarmlessIf(|_| false, "the peak is `optimizer.learning_rate`", "write it there and remove this key"),
    ),
    (
        "runtime.checkpoint.every_n_epochs",
        Former::HarmlessIf(|_| false, EPOCHS, "write runtime.checkpoint.every_n_steps"),
    ),
    (
        "runtime.evaluation.every_n_epochs",
        Former::HarmlessIf(|_| false, EPOCHS, "write runtime.evaluation.every_n_steps"),
    ),
    ("runtime.logging.enable_stdout", Former::Ignored("progress is always shown; redirect it where it should go")),
    ("runtime.logging.tensorboard_flush_every_n", Former::Ignored("event files are complete after every logged step")),
];

const VALUES: [(&str, &str, &str); 2] =
    [("optimizer.algorithm", "adam_w", "adamw"), ("scheduler.strategy", "cosine_with_warmup", "cosine")];

/// Strings that stand for a boolean rather than for a folder.
const TRUTHS: [&str; 6] = ["true", "false", "yes", "no", "on", "off"];

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_rope_mode(value: &Value) -> bool {
    matches!(value.as_str(), Some("preapply" | "on_the_fly"))
}

/// Replaces former keys and values in the document.
pub(crate) fn translate(document: &mut Map<String, Value>, notes: &mut Vec<String>, problems: &mut Vec<Problem>) {
    for (path, former) in &KEYS {
        let (section, key) = split(path);
        let Some(value) = section_mut(document, section).and_then(|section| section.shift_remove(key)) else {
            continue;
        };
        match former {
            _ if value.is_null() => {}
            Former::Ignored(reason) => notes.push(format!("{path} has no effect: {reason}")),
            Former::HarmlessIf(harmless, ..) if harmless(&value) => {}
            Former::HarmlessIf(_, message, suggestion) => {
                problems.push(Problem::new(*path, format!("is {value}, but {message}")).suggest(*suggestion));
            }
        }
    }
    for (path, old, new) in VALUES {
        let (section, key) = split(path);
        if let Some(value) = section_mut(document, section).and_then(|section| section.get_mut(key))
            && value == old
        {
            *value = new.into();
        }
    }
    tensorboard_folder(document);
}

/// Translates a folder in `runtime.logging.tensorboard`, where it used to be named, to `tensorboard_directory`.
fn tensorboard_folder(document: &mut Map<String, Value>) {
    let Some(logging) = section_mut(document, "runtime.logging") else {
        return;
    };
    if !logging.contains_key("tensorboard_directory")
        && let Some(folder) =
            logging.get("tensorboard").and_then(Value::as_str).filter(|text| !TRUTHS.contains(text)).map(str::to_owned)
    {
        logging.insert("tensorboard".to_owned(), true.into());
        logging.insert("tensorboard_directory".to_owned(), folder.into());
    }
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

fn section_mut<'a>(document: &'a mut Map<String, Value>, path: &str) -> Option<&'a mut Map<String, Value>> {
    path.split('.').try_fold(document, |section, name| section.get_mut(name)?.as_object_mut())
}
