//! Bounds the values that a chat template makes: how deep and large they are, and that none holds itself.
//!
//! minijinja compares, prints and drops a value recursively, and charges fuel for the whole of it at best afterwards. So
//! a template is rewritten before it is compiled: what a bracket makes, and what a name is bound to, passes through the
//! filter [`BOUNDED`]. Only the attributes of a namespace can be changed once they are there, so only through them can a
//! value come to hold itself: what is assigned to one passes through [`HELD`]. Factors pass through [`FACTOR`], since a
//! list that is repeated has no size in memory and any size once it is printed.

use std::ops::Range;

use minijinja::machinery::Token;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, functions};

use super::template_edits::Edits;
use super::template_limits::{Tag, visit_tags};

/// The filter of what brackets make and names are bound to.
const BOUNDED: &str = "__bounded";
/// The filter of what an attribute of a namespace is set to.
const HELD: &str = "__held";
/// The filter of factors.
const FACTOR: &str = "__factor";
/// Words that stand before a value, or between two.
pub(super) const KEYWORDS: [&str; 9] = ["if", "elif", "else", "in", "not", "and", "or", "is", "for"];
/// How deep a value may be. Rows of a data set are JSON, which is read to a depth of 128.
const MAX_DEPTH: usize = 200;
/// Bytes of a value's strings for one unit of the fuel of a rendering, which has one for each byte of the messages.
const BYTES_PER_FUEL: u64 = 4;
/// The type of what the function `namespace` returns, and where those of macros and loops are: minijinja keeps them to
/// itself.
const NAMESPACE: &str = "minijinja::value::namespace_object::Namespace";
const PROGRAM: &str = "minijinja::vm::";

/// Adds the filters to an environment, and one of them to its function `dict`.
pub(super) fn add_filters(environment: &mut Environment) {
    environment.add_filter(BOUNDED, |state: &mut State, value: Value| Visit::new(state, false).checked(value));
    environment.add_filter(HELD, |state: &mut State, value: Value| Visit::new(state, true).checked(value));
    environment.add_filter(FACTOR, factor);
    environment.add_function("dict", |state: &mut State, value: Option<Value>, update: Kwargs| {
        Visit::new(state, false).checked(functions::dict(value, update)?)
    });
}

/// Adds the filters to a template's source.
pub(super) fn with_bounded_values(source: &str, syntax: &SyntaxConfig) -> Result<String, String> {
    let mut edits = Edits::default();
    visit_tags(source, syntax, |tag| {
        let binding = Binding::of(tag);
        bound_brackets(tag, &binding, &mut edits);
        bound_factors(tag, &mut edits);
        if let Some(start) = binding.sets_attribute {
            if start > tag.tokens[0].1.end {
                edits.insert(start, "(");
                edits.insert(value_end(tag), format!(")|{HELD}"));
            } else {
                edits.insert(value_end(tag), format!("|{HELD}"));
            }
        }
        let delimiter = &source[tag.end.clone()];
        for name in &binding.names {
            edits.insert(tag.end.end, format!("{{% set {name} = {name}|{BOUNDED} {delimiter}"));
        }
        Ok(())
    })?;
    Ok(edits.apply(source))
}
/// What a tag binds values to.
#[derive(Default)]
struct Binding<'a> {
    /// Names that are bound in what follows the tag.
    names: Vec<&'a str>,
    /// Where the value starts, if it becomes an attribute of a namespace; before the end of the tag's first token if it
    /// is text that follows the tag, whose filters stand in the tag.
    sets_attribute: Option<usize>,
    /// The tokens of the targets, which are no values.
    targets: Vec<Range<usize>>,
}

impl<'a> Binding<'a> {
    fn of(tag: &Tag<'a>) -> Self {
        let Some((Token::Ident(keyword), _)) = tag.tokens.first().filter(|_| tag.is_statement) else {
            return Self::default();
        };
        match *keyword {
            "set" => Self::of_set(tag),
            "for" => {
                let end = position(tag, 1, |token| matches!(token, Token::Ident("in"))).unwrap_or(1);
                // The items of a value are bounded as it is, unless filters, calls or a recursive loop make new ones.
                let makes_values = tag.tokens[end..]
                    .iter()
                    .any(|(token, _)| matches!(token, Token::Pipe | Token::ParenOpen | Token::Ident("recursive")));
                let targets = std::iter::once(1..end).collect();
                if makes_values { Self::of_targets(tag, targets) } else { Self { targets, ..Self::default() } }
            }
            "with" => Self::of_targets(tag, with_targets(tag)),
            "macro" => Self { names: parameters(tag, 2), ..Self::default() },
            "call" => Self { names: parameters(tag, 1), ..Self::default() },
            _ => Self::default(),
        }
    }

    fn of_set(tag: &Tag<'a>) -> Self {
        let assign = position(tag, 1, |token| matches!(token, Token::Assign));
        let pipe = position(tag, 1, |token| matches!(token, Token::Pipe));
        let end = assign.or(pipe).unwrap_or(tag.tokens.len());
        let sets_attribute = tag.tokens[1..end].iter().any(|(token, _)| matches!(token, Token::Dot));
        match (sets_attribute, assign, pipe) {
            (false, Some(_), _) => Self::of_targets(tag, std::iter::once(1..end).collect()),
            (true, Some(assign), _) => Self {
                sets_attribute: Some(tag.tokens[assign].1.end),
                targets: std::iter::once(1..end).collect(),
                ..Self::default()
            },
            (true, None, Some(_)) => Self { sets_attribute: Some(0), ..Self::default() },
            _ => Self::default(),
        }
    }

    fn of_targets(tag: &Tag<'a>, targets: Vec<Range<usize>>) -> Self {
        let names =
            targets.iter().flat_map(|target| &tag.tokens[target.clone()]).filter_map(|(token, _)| match token {
                Token::Ident(name) => Some(*name),
                _ => None,
            });
        Self { names: names.collect(), sets_attribute: None, targets }
    }
}

/// Passes what brackets make through the filter: lists, dictionaries, tuples and expressions in parentheses.
fn bound_brackets(tag: &Tag, binding: &Binding, edits: &mut Edits) {
    // Where each of the open brackets starts, if it makes a value.
    let mut open = Vec::new();
    for (index, (token, place)) in tag.tokens.iter().enumerate() {
        match token {
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => {
                let is_target = binding.targets.iter().any(|target| target.contains(&index));
                open.push((!is_target && !is_postfix(tag, index)).then_some(place.start));
            }
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                if let Some(start) = open.pop().flatten() {
                    edits.insert(start, "(");
                    edits.insert(place.end, format!("|{BOUNDED})"));
                }
            }
            _ => {}
        }
    }
}

/// Whether a bracket is that of a call or an item: it follows a value.
fn is_postfix(tag: &Tag, bracket: usize) -> bool {
    let Some(previous) = bracket.checked_sub(1) else { return false };
    match &tag.tokens[previous].0 {
        Token::Ident(name) => !KEYWORDS.contains(name),
        Token::Str(_) | Token::String(_) | Token::ParenClose | Token::BracketClose | Token::BraceClose => true,
        _ => false,
    }
}

/// Passes both sides of each `*` through the filter. A side is a value with what follows it and its filters, which
/// bind tighter than `*`.
fn bound_factors(tag: &Tag, edits: &mut Edits) {
    for (index, (token, _)) in tag.tokens.iter().enumerate().skip(1) {
        // In a call, `f(*arguments)`, nothing stands before it.
        let follows_value = !matches!(tag.tokens[index - 1].0, Token::ParenOpen | Token::Comma);
        if matches!(token, Token::Mul) && follows_value {
            edits.insert(tag.tokens[index - 1].1.end, format!("|{FACTOR} "));
            if let Some((_, last)) = tag.tokens.get(operand_end(tag, index + 1)) {
                edits.insert(last.end, format!("|{FACTOR} "));
            }
        }
    }
}

/// Returns the index of the last token of the value that starts at a token, with its filters.
pub(super) fn operand_end(tag: &Tag, start: usize) -> usize {
    let token = |index: usize| tag.tokens.get(index).map(|(token, _)| token);
    let mut end = start;
    while let Some(Token::Minus) = token(end) {
        end += 1;
    }
    if let Some(Token::ParenOpen | Token::BracketOpen | Token::BraceOpen) = token(end) {
        end = closing(tag, end);
    }
    loop {
        match token(end + 1) {
            Some(Token::Str(_) | Token::String(_)) => end += 1,
            Some(Token::Dot | Token::Pipe) => end += 2,
            Some(Token::ParenOpen | Token::BracketOpen) => end = closing(tag, end + 1),
            _ => return end,
        }
    }
}

/// Returns by how much a token changes the number of open brackets.
pub(super) fn depth_change(token: &Token) -> isize {
    match token {
        Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => 1,
        Token::ParenClose | Token::BracketClose | Token::BraceClose => -1,
        _ => 0,
    }
}

/// Returns the end of a tag's last token.
fn value_end(tag: &Tag) -> usize {
    tag.tokens.last().map_or(tag.end.start, |(_, place)| place.end)
}

/// Returns the index of the first token outside brackets, from `start` on, that fulfils a condition.
fn position(tag: &Tag, start: usize, condition: impl Fn(&Token) -> bool) -> Option<usize> {
    let mut depth = 0_usize;
    (start..tag.tokens.len()).find(|&index| {
        let token = &tag.tokens[index].0;
        depth = depth.saturating_add_signed(depth_change(token));
        depth == 0 && condition(token)
    })
}

/// Returns the tokens of the targets of a `with`: those before each `=`.
fn with_targets(tag: &Tag) -> Vec<Range<usize>> {
    let (mut targets, mut start) = (Vec::new(), 1);
    while let Some(assign) = position(tag, start, |token| matches!(token, Token::Assign)) {
        targets.push(start..assign);
        match position(tag, assign, |token| matches!(token, Token::Comma)) {
            Some(comma) => start = comma + 1,
            None => break,
        }
    }
    targets
}

/// Returns the names of the parameters in the brackets that start at token `open`, if any do.
fn parameters<'a>(tag: &Tag<'a>, open: usize) -> Vec<&'a str> {
    let Some((Token::ParenOpen, _)) = tag.tokens.get(open) else { return Vec::new() };
    let (mut parameters, mut start, end) = (Vec::new(), open + 1, closing(tag, open));
    while let Some((Token::Ident(name), _)) = tag.tokens.get(start) {
        parameters.push(*name);
        match position(tag, start, |token| matches!(token, Token::Comma)) {
            Some(comma) if comma < end => start = comma + 1,
            _ => break,
        }
    }
    parameters
}

/// Returns the index of the token that closes the bracket at `open`.
fn closing(tag: &Tag, open: usize) -> usize {
    position(tag, open, |token| depth_change(token) < 0).unwrap_or(tag.tokens.len())
}

/// Returns a factor; fails for a list.
fn factor(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            Err(invalid("it repeats a list: only numbers and texts can be multiplied"))
        }
        _ => Ok(value),
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// A walk through a value and all that it holds, each time that it holds it.
struct Visit<'a, 'template, 'env> {
    state: &'a State<'template, 'env>,
    /// Whether the value becomes an attribute of a namespace.
    is_attribute: bool,
    bytes: u64,
    max_bytes: u64,
}

impl<'a, 'template, 'env> Visit<'a, 'template, 'env> {
    fn new(state: &'a State<'template, 'env>, is_attribute: bool) -> Self {
        let (used_fuel, remaining_fuel) = state.fuel_levels().unwrap_or_default();
        Self { state, is_attribute, bytes: 0, max_bytes: BYTES_PER_FUEL * (used_fuel + remaining_fuel) }
    }

    /// Returns the value; fails if it is too deep or too large, or may come to hold itself.
    fn checked(mut self, value: Value) -> Result<Value, Error> {
        self.visit(&value, 0)?;
        Ok(value)
    }

    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.state.consume_fuel(1)?;
        self.bytes += value.as_str().map_or(0, |text| text.len() as u64);
        if self.bytes > self.max_bytes {
            return Err(ErrorKind::OutOfFuel.into());
        }
        if self.is_attribute {
            check_attribute(value)?;
        }
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            return Ok(());
        }
        if depth == MAX_DEPTH {
            let message = format!("it makes a value of more than {MAX_DEPTH} lists and dictionaries in each other");
            return Err(invalid(message));
        }
        for item in value.try_iter()? {
            if value.kind() == ValueKind::Map {
                self.visit(&value.get_item(&item)?, depth + 1)?;
            }
            self.visit(&item, depth + 1)?;
        }
        Ok(())
    }
}

/// Checks that a part of an attribute's value is data, which cannot lead back to its namespace.
fn check_attribute(value: &Value) -> Result<(), Error> {
    let type_name = value.as_object().map_or("", |object| object.type_name());
    let part = match type_name {
        NAMESPACE => "a namespace",
        _ if type_name.starts_with(PROGRAM) || value.kind() == ValueKind::Plain => "a function or a loop",
        _ => return Ok(()),
    };
    Err(invalid(format!(
        "it sets an attribute of a namespace to {part}, and one may hold text, numbers, lists and dictionaries only"
    )))
}
