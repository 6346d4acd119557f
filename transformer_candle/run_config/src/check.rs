//! Checking a document key by key against the schema: unknown keys, missing keys, wrong types,
//! values out of range.

use std::collections::BTreeSet;
use std::str::FromStr;

use serde_json::{Map, Number, Value};

use crate::error::Problem;
use crate::schema::{self, REQUIRED};
use crate::{BatchSize, Bos, ByteSize, Device, NumWorkers, TargetModules, TimeSpan};

/// Most characters of a key or value that a message shows.
const LONGEST_SHOWN: usize = 60;

/// The findings of a check: its problems, and the keys that are valid or refused.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// The problems, in the order of the schema.
    pub problems: Vec<Problem>,
    /// Keys that have a valid value.
    pub valid_keys: BTreeSet<String>,
    /// Keys whose value was refused; rules about them would only repeat it.
    pub rejected: BTreeSet<String>,
}

/// Checks the document and removes from it what is wrong, so that the rest can still be read and
/// checked further.
pub(crate) fn check(document: &mut Map<String, Value>) -> Findings {
    let mut findings = Findings::default();
    findings.section(schema::schema(), document, "");
    findings
}

impl Findings {
    fn section(&mut self, schema: &Value, section: &mut Map<String, Value>, path: &str) {
        let keys: Vec<&str> = schema::properties(schema).map(|(key, _)| key).collect();
        let unknown: Vec<String> = section.keys().filter(|key| !keys.contains(&key.as_str())).cloned().collect();
        for key in unknown {
            section.shift_remove(&key);
            if let Some(nearest_key) =
                nearest(&key, keys.iter().copied()).filter(|nearest_key| !section.contains_key(*nearest_key))
            {
                self.reject(&schema["properties"][nearest_key], &schema::join(path, nearest_key));
            }
            self.problems.push(unknown_key(path, &key, &keys));
        }
        for (key, schema) in schema::properties(schema) {
            let path = schema::join(path, key);
            if schema::is_section(schema) {
                self.inner_section(schema, section, key, &path);
            } else {
                self.leaf(schema, section, key, &path);
            }
        }
    }

    fn inner_section(&mut self, schema: &Value, section: &mut Map<String, Value>, key: &str, path: &str) {
        match section.get_mut(key) {
            Some(Value::Object(inner)) => return self.section(schema, inner, path),
            None | Some(Value::Null) => self.section(schema, &mut Map::new(), path),
            Some(value) => {
                let keys: Vec<_> = schema::properties(schema).map(|(key, _)| format!("`{key}`")).take(3).collect();
                let message =
                    format!("is {}, but must be a section with keys such as {}", shown(value), keys.join(", "));
                self.problems.push(Problem::new(path, message));
                self.reject(schema, path);
            }
        }
        section.shift_remove(key);
    }

    /// Checks an item of a list of sections.
    fn item(&mut self, schema: &Value, item: &mut Value, path: &str) {
        let Value::Object(item) = item else {
            let message = format!("is {}, but must be {}", shown(item), expectation(schema));
            self.problems.push(Problem::new(path, message));
            return;
        };
        self.section(schema, item, path);
        for key in schema::required(schema) {
            let path = schema::join(path, key);
            if !self.valid_keys.contains(&path) && !self.rejected.contains(&path) {
                let message = format!("is missing; it must be {}", expectation(&schema["properties"][key]));
                self.problems.push(Problem::new(path, message));
            }
        }
    }

    /// Marks a key, or all keys of a section, as reported.
    fn reject(&mut self, schema: &Value, path: &str) {
        self.rejected.insert(path.to_owned());
        for (key, schema) in schema::properties(schema) {
            self.reject(schema, &schema::join(path, key));
        }
    }

    fn leaf(&mut self, schema: &Value, section: &mut Map<String, Value>, key: &str, path: &str) {
        match section.get_mut(key) {
            None | Some(Value::Null) => {
                if REQUIRED.contains(&path) && !self.rejected.contains(path) {
                    self.problems.push(Problem::new(path, format!("is missing; it must be {}", expectation(schema))));
                    self.rejected.insert(path.to_owned());
                }
                if !allows(schema, "null") {
                    section.shift_remove(key);
                }
            }
            Some(Value::Array(items)) if schema::item(schema).is_some() => {
                for (index, item) in items.iter_mut().enumerate() {
                    let (path, problems) = (format!("{path}[{index}]"), self.problems.len());
                    self.item(&schema["items"], item, &path);
                    if self.problems.len() > problems {
                        *item = placeholder(&schema["items"]);
                        self.rejected.insert(path);
                    }
                }
                self.valid_keys.insert(path.to_owned());
            }
            Some(value) => match check_value(schema, value, path) {
                Ok(()) => {
                    self.valid_keys.insert(path.to_owned());
                }
                Err(problem) => {
                    section.shift_remove(key);
                    self.problems.push(problem);
                    self.rejected.insert(path.to_owned());
                }
            },
        }
    }
}

/// Returns a placeholder for a list item that was refused, so that the others keep their places and can be checked: its
/// required keys, which are numbers.
fn placeholder(item: &Value) -> Value {
    schema::required(item).map(|key| (key, 1)).collect()
}

/// Checks one value; a float that is whole becomes an integer where the key wants one, so that
/// `1e5` steps can be written.
fn check_value(schema: &Value, value: &mut Value, path: &str) -> Result<(), Problem> {
    let choices = schema::choices(schema);
    if !choices.is_empty() {
        return check_choice(schema, &choices, value, path);
    }
    if let Some(format) = own_format(schema) {
        return check_format(schema, format, value, path);
    }
    if allows(schema, "integer")
        && let Some(whole) =
            value.as_f64().filter(|number| value.is_f64() && number.fract() == 0.0 && number.abs() < 9e15)
    {
        *value = (whole as i64).into();
    }
    match value {
        Value::Bool(_) if allows(schema, "boolean") => Ok(()),
        Value::String(text) if allows(schema, "string") => check_text(text, path),
        Value::Array(items) if allows(schema, "array") => check_list(items, path),
        Value::Number(number) if allows(schema, "number") || (allows(schema, "integer") && !number.is_f64()) => {
            if in_range(schema, number) {
                Ok(())
            } else {
                Err(refusal(schema, value, path))
            }
        }
        _ => Err(refusal(schema, value, path)),
    }
}

fn check_choice(schema: &Value, choices: &[(&str, &str)], value: &Value, path: &str) -> Result<(), Problem> {
    let text = value.as_str().unwrap_or_default();
    if choices.iter().any(|(choice, _)| *choice == text) {
        return Ok(());
    }
    let problem = unexpected(schema, value, path);
    Err(match nearest(text, choices.iter().map(|(choice, _)| *choice)) {
        Some(near) => problem.suggest(format!("did you mean `{near}`?")),
        None => problem,
    })
}

fn check_format(schema: &Value, format: OwnFormat, value: &Value, path: &str) -> Result<(), Problem> {
    let valid = match value {
        Value::String(text) => format(text),
        Value::Number(number) if allows(schema, "integer") => format(&number.to_string()),
        Value::Bool(boolean) if allows(schema, "boolean") => format(&boolean.to_string()),
        Value::Array(items) if allows(schema, "array") => {
            return items.iter().enumerate().try_for_each(|(index, item)| {
                check_format(&schema["items"], format, item, &format!("{path}[{index}]"))
            });
        }
        _ => return Err(unexpected(schema, value, path)),
    };
    valid.map_err(|expected| Problem::new(path, format!("is {}, but {expected}", shown(value))))
}

fn unexpected(schema: &Value, value: &Value, path: &str) -> Problem {
    Problem::new(path, format!("is {}, but must be {}", shown(value), expectation(schema)))
}

/// The problem of a value of the wrong type or out of range, with what was probably meant.
fn refusal(schema: &Value, value: &Value, path: &str) -> Problem {
    let problem = unexpected(schema, value, path);
    let numeric = allows(schema, "number") || allows(schema, "integer");
    match value {
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "yes" | "on" | "true" | "y" if allows(schema, "boolean") => problem.suggest("write true"),
            "no" | "off" | "false" | "n" if allows(schema, "boolean") => problem.suggest("write false"),
            number if numeric && number.parse::<f64>().is_ok_and(f64::is_finite) => {
                problem.suggest(format!("remove the quotes: {text}"))
            }
            _ if allows(schema, "array") && schema::item(schema).is_none() => {
                problem.suggest(format!("write a list: [{text:?}]"))
            }
            _ => problem,
        },
        Value::Number(number) if number.as_f64() == Some(0.0) && allows(schema, "null") => {
            problem.suggest("write null for none")
        }
        Value::Number(_) | Value::Bool(_) if allows(schema, "string") => problem.suggest("put it in quotes"),
        _ => problem,
    }
}

fn check_text(text: &str, path: &str) -> Result<(), Problem> {
    if text.trim().is_empty() {
        return Err(Problem::new(path, "is an empty string").suggest("remove the key to leave it out"));
    }
    if text.contains('\0') {
        return Err(Problem::new(path, format!("is {text:?}, which contains a NUL character")));
    }
    Ok(())
}

fn check_list(items: &[Value], path: &str) -> Result<(), Problem> {
    for (index, item) in items.iter().enumerate() {
        let path = format!("{path}[{index}]");
        match item {
            Value::String(text) => check_text(text, &path)?,
            other => {
                return Err(Problem::new(path, format!("is {}, but must be a string", shown(other)))
                    .suggest("put it in quotes"));
            }
        }
    }
    Ok(())
}

/// Checks a string; the error of an invalid one says what is expected.
type OwnFormat = fn(&str) -> Result<(), String>;

/// Returns the check of a format that a type of this crate defines; `None` for formats of JSON Schema itself.
fn own_format(schema: &Value) -> Option<OwnFormat> {
    match schema.get("format")?.as_str()? {
        "device" => Some(|text| Device::from_str(text).map(drop)),
        "bos" => Some(|text| Bos::from_str(text).map(drop)),
        "batch-size" => Some(|text| BatchSize::from_str(text).map(drop)),
        "num-workers" => Some(|text| NumWorkers::from_str(text).map(drop)),
        "time-span" => Some(|text| TimeSpan::from_str(text).map(drop)),
        "lora-modules" => Some(TargetModules::check),
        "date" => Some(crate::data::check_date),
        "byte-size" => Some(|text| ByteSize::from_str(text).map(drop)),
        _ => None,
    }
}

fn in_range(schema: &Value, number: &Number) -> bool {
    // As f64 the integers around 2^63 are one number.
    if let (Some(integer), Some(least), Some(most)) =
        (number.as_i128(), integer_bound(schema, "minimum"), integer_bound(schema, "maximum"))
    {
        return (least..=most).contains(&integer);
    }
    let number = number.as_f64().unwrap_or(f64::NAN);
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    number.is_finite()
        && bound("minimum").is_none_or(|least| number >= least)
        && bound("maximum").is_none_or(|most| number <= most)
        && bound("exclusiveMinimum").is_none_or(|least| number > least)
        && bound("exclusiveMaximum").is_none_or(|most| number < most)
}

fn integer_bound(schema: &Value, name: &str) -> Option<i128> {
    schema.get(name)?.as_number()?.as_i128()
}

/// Whether the schema names this JSON type.
pub(crate) fn allows(schema: &Value, name: &str) -> bool {
    match schema.get("type") {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(names)) => names.iter().any(|allowed| allowed == name),
        _ => false,
    }
}

/// Returns the values that a key takes, in words: `an integer from 1 to 1024`.
pub(crate) fn expectation(schema: &Value) -> String {
    let choices = schema::choices(schema);
    if let [(only, _)] = choices.as_slice() {
        return format!("`{only}`");
    }
    if !choices.is_empty() {
        let names: Vec<_> = choices.iter().map(|(choice, _)| format!("`{choice}`")).collect();
        return format!("one of {}", names.join(", "));
    }
    if let Some(Err(expected)) = own_format(schema).map(|format| format("")) {
        return expected.trim_start_matches("must be ").to_owned();
    }
    if schema::is_section(schema) {
        let keys: Vec<_> = schema::properties(schema).map(|(key, _)| key).collect();
        return format!("a section with the keys {}", keys.join(", "));
    }
    if let Some(item) = schema::item(schema) {
        return format!("a list, each item {}", expectation(item));
    }
    match (allows(schema, "array"), allows(schema, "string")) {
        (true, true) => "a list of strings or the path of a file".to_owned(),
        (true, false) => "a list of strings".to_owned(),
        (false, true) => "a string".to_owned(),
        _ if allows(schema, "boolean") => "true or false".to_owned(),
        _ if allows(schema, "integer") => format!("an integer{}", range(schema)),
        _ => format!("a number{}", range(schema)),
    }
}

fn range(schema: &Value) -> String {
    let bound = |name: &str| schema.get(name).map(ToString::to_string);
    let above = bound("exclusiveMinimum").map(|least| format!("greater than {}", plain(&least)));
    let below = bound("exclusiveMaximum").map(|most| format!("less than {}", plain(&most)));
    match (bound("minimum"), bound("maximum"), above, below) {
        (Some(least), Some(most), ..) => format!(" from {} to {}", plain(&least), plain(&most)),
        (Some(least), _, _, Some(below)) => format!(" of at least {} and {below}", plain(&least)),
        (_, Some(most), Some(above), _) => format!(" {above} and at most {}", plain(&most)),
        _ => String::new(),
    }
}

/// Removes the `.0` of a number such as `1000000.0`.
fn plain(number: &str) -> &str {
    number.strip_suffix(".0").unwrap_or(number)
}

fn unknown_key(section: &str, key: &str, siblings: &[&str]) -> Problem {
    let shown_key: String = key.chars().take(LONGEST_SHOWN).flat_map(char::escape_debug).collect();
    let problem = Problem::new(schema::join(section, &shown_key), "is an unknown key");
    if let Some(sibling) = nearest(key, siblings.iter().copied()) {
        return problem.suggest(format!("did you mean `{}`?", schema::join(section, sibling)));
    }
    let mut paths = Vec::new();
    paths_of(schema::schema(), "", key, &mut paths);
    match paths.first() {
        Some(path) => problem.suggest(format!("did you mean `{path}`?")),
        None => problem.suggest(format!("the keys here are {}", siblings.join(", "))),
    }
}

/// Appends the paths of all keys with this name to `paths`.
fn paths_of(schema: &Value, section: &str, name: &str, paths: &mut Vec<String>) {
    for (key, schema) in schema::properties(schema) {
        let path = schema::join(section, key);
        if key == name {
            paths.push(path.clone());
        }
        paths_of(schema, &path, name, paths);
    }
}

/// Returns the candidate that a misspelled name most likely meant; `None` if none is similar.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let name = name.to_ascii_lowercase();
    candidates
        .map(|candidate| (strsim::jaro_winkler(&name, candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.82)
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, candidate)| candidate)
}

/// Formats a value for a message, shortened if it is long.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Object(_) => "a section".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::String(text) if [".nan", ".inf", "-.inf"].contains(&text.as_str()) => text.clone(),
        other => {
            let text = other.to_string();
            if text.chars().count() <= LONGEST_SHOWN {
                text
            } else {
                text.chars().take(LONGEST_SHOWN).chain("...".chars()).collect()
            }
        }
    }
}
