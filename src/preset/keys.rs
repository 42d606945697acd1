//! The keys of a preset by name: reading and writing TOML, setting a key from text, and what follows when a few keys change.
//!
//! `Preset::apply` is the one way in which flags change a preset: cli calls it for a new run, the train recipe for a resumed
//! one. Every message names the key; the caller adds the flag or file that it came from.

use std::path::Path;

use serde::Serializer;
use toml::{Table, Value};

use super::{Model, Preset};
use crate::error::{Error, Result, nearest};

/// Keys of which one sets the length of a run; giving one puts the others aside.
const HORIZON: [&str; 3] = ["train.steps", "train.epochs", "train.tokens"];

impl Preset {
    /// Reads a complete preset; `place` names it in errors.
    pub fn parse(text: &str, place: &Path) -> Result<Self> {
        let said = |what: String| Error::usage(format!("{}: {what}", place.display()));
        let table: Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |span| text[..span.start].lines().count().max(1));
            said(format!("line {line}: {}", e.message()))
                .with_hint("a preset is TOML; compare with the files in presets/")
        })?;
        complete(&table, said)?;
        table.try_into().map_err(|e: toml::de::Error| said(e.message().trim_end().to_owned()))
    }

    /// The preset as TOML that `parse` reads back to the same.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("plain tables of numbers and strings always have a TOML form")
    }

    /// Sets one key ("model.hidden_size") from text, as `--set` and the flags do; nothing else changes.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let mut table = self.table();
        let slot = key
            .split_once('.')
            .and_then(|(section, name)| table.get_mut(section)?.as_table_mut()?.get_mut(name))
            .ok_or_else(|| unknown(key))?;
        let now = show(slot);
        *slot = parsed(slot, value).ok_or_else(|| {
            let what = format!("{key}: `{value}` is not {}", kind(slot));
            Error::usage(what).with_hint(format!("a value such as {now}"))
        })?;
        *self = table.try_into().map_err(|e: toml::de::Error| Error::usage(format!("{key}: {}", e.message())))?;
        Ok(())
    }

    /// The value of a key, if there is such a key.
    pub fn get(&self, key: &str) -> Option<Value> {
        let (section, name) = key.split_once('.')?;
        self.table().get(section)?.as_table()?.get(name).cloned()
    }

    /// Sets the given keys, then what must follow from them: the other two horizons go, and heads, head_dim and the inner
    /// size fit a new hidden size unless they were given too. Returns sentences about what followed.
    pub fn apply(&mut self, given: &[(String, String)]) -> Result<Vec<String>> {
        let before = self.model.clone();
        for (key, value) in given {
            self.set(key, value)?;
        }
        let is_given = |key: &str| given.iter().any(|(k, _)| k == key);
        let horizons: Vec<_> = HORIZON.into_iter().filter(|key| is_given(key)).collect();
        if let [first, second, ..] = horizons[..] {
            let what = format!("both {first} and {second} say how long the run is");
            return Err(Error::usage(what).with_hint("give one of --steps, --epochs and --tokens"));
        }
        if let [one] = horizons[..] {
            for other in HORIZON.into_iter().filter(|key| *key != one) {
                self.set(other, "0")?;
            }
        }
        self.model.fit_shape(&before, is_given)
    }

    fn table(&self) -> Table {
        Table::try_from(self).expect("plain structs always have a TOML form")
    }
}

impl Model {
    /// Makes the shape whole again after keys of it were set: what was not given follows from what was.
    fn fit_shape(&mut self, before: &Model, is_given: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        let given = |name: &str| is_given(&format!("model.{name}"));
        // A preset whose heads do not fill its hidden size was shaped on purpose, and heads of 0 are refused by validate.
        let filled = before.num_attention_heads * before.head_dim == before.hidden_size;
        let (hidden, heads, dim) = (given("hidden_size"), given("num_attention_heads"), given("head_dim"));
        let positive = self.hidden_size > 0 && self.num_attention_heads > 0 && self.head_dim > 0;
        if filled && positive && (hidden || heads || dim) && !(heads && dim) {
            if heads { self.fit_head_dim()? } else { self.fit_heads()? }
        }
        if !given("num_key_value_heads") && before.num_key_value_heads == before.num_attention_heads {
            self.num_key_value_heads = self.num_attention_heads;
        }
        if hidden && !given("intermediate_size") && before.hidden_size > 0 {
            let scaled = before.intermediate_size as f64 * self.hidden_size as f64 / before.hidden_size as f64;
            self.intermediate_size = ((scaled / 64.0).round() as usize).max(1) * 64;
        }
        for (name, old, new) in [
            ("num_attention_heads", before.num_attention_heads, self.num_attention_heads),
            ("num_key_value_heads", before.num_key_value_heads, self.num_key_value_heads),
            ("head_dim", before.head_dim, self.head_dim),
            ("intermediate_size", before.intermediate_size, self.intermediate_size),
        ] {
            if old != new && !given(name) {
                notes.push(format!("model.{name} = {new} follows from the shape given (was {old})"));
            }
        }
        Ok(notes)
    }

    fn fit_head_dim(&mut self) -> Result<()> {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(2) {
            let fits: Vec<_> = (1..=64).filter(|h| hidden.is_multiple_of(h * 2)).map(|h| h.to_string()).collect();
            let what = format!("a hidden size of {hidden} does not divide into {heads} heads of even size");
            let hint = format!("use --heads {}; or give --head-dim as well", fits.join(" or "));
            return Err(Error::usage(what).with_hint(hint));
        }
        self.head_dim = hidden / heads;
        Ok(())
    }

    fn fit_heads(&mut self) -> Result<()> {
        let (hidden, dim) = (self.hidden_size, self.head_dim);
        if !hidden.is_multiple_of(dim) {
            let low = (hidden / dim * dim).max(dim);
            let what = format!("a hidden size of {hidden} does not divide into heads of {dim}");
            let hint = format!("use --hidden-size {low} or {}; or give --heads or --head-dim as well", low + dim);
            return Err(Error::usage(what).with_hint(hint));
        }
        self.num_attention_heads = hidden / dim;
        Ok(())
    }
}

/// Every key, as "section.name", in the order of the files.
pub fn keys() -> Vec<String> {
    keys_of(&template())
}

/// A complete preset: which keys there are, and of which types.
fn template() -> Table {
    let tiny: Preset = toml::from_str(super::BUILT_IN[0].1).expect("a test parses every built-in preset");
    tiny.table()
}

fn keys_of(table: &Table) -> Vec<String> {
    let sections = table.iter().filter_map(|(section, value)| Some((section, value.as_table()?)));
    sections.flat_map(|(section, table)| table.keys().map(move |name| format!("{section}.{name}"))).collect()
}

fn unknown(key: &str) -> Error {
    let hint = nearest(key, keys().iter().map(String::as_str));
    Error::usage(format!("unknown key `{key}`"))
        .with_hint(hint.unwrap_or_else(|| "`gpt presets tiny` shows every key".into()))
}

/// Holds a file against the template: no key too many, none missing, every value of its type.
fn complete(table: &Table, said: impl Fn(String) -> Error) -> Result<()> {
    let template = template();
    let known = keys_of(&template);
    let stray = table
        .iter()
        .find(|(section, value)| template.get(*section).is_none_or(|expected| expected.is_table() != value.is_table()));
    if let Some((name, _)) = stray {
        let hint = nearest(name, template.keys().chain(&known).map(String::as_str));
        let sections = template.keys().cloned().collect::<Vec<_>>().join(", ");
        let hint = hint.unwrap_or_else(|| format!("at the top there are: {sections}"));
        return Err(said(format!("unknown key `{name}`")).with_hint(hint));
    }
    for key in keys_of(table) {
        if !known.contains(&key) {
            let error = unknown(&key);
            return Err(said(error.to_string()).with_hint(error.hint().unwrap_or_default()));
        }
    }
    if !table.contains_key("name") {
        return Err(said("no `name`".into()).with_hint("start the file with name = \"...\""));
    }
    for key in known {
        let value = |table: &Table| {
            let (section, name) = key.split_once('.')?;
            table.get(section)?.as_table()?.get(name).cloned()
        };
        let expected = value(&template).expect("the key is the template's");
        let Some(found) = value(table) else {
            let hint = format!("a preset is complete; {} has {key} = {expected}", "presets/tiny.toml");
            return Err(said(format!("no `{key}`")).with_hint(hint));
        };
        let negative = found.as_integer().is_some_and(|n| n < 0) && expected.is_integer();
        if negative || !(found.same_type(&expected) || expected.is_float() && found.is_integer()) {
            return Err(said(format!("{key}: {found} is not {}", kind(&expected))));
        }
    }
    Ok(())
}

/// Text as a value of the type that the slot has.
fn parsed(slot: &Value, text: &str) -> Option<Value> {
    Some(match slot {
        Value::Integer(_) => Value::Integer(whole(text)?),
        Value::Float(_) => Value::Float(text.parse().ok().filter(|n: &f64| n.is_finite())?),
        Value::Boolean(_) => Value::Boolean(text.parse().ok()?),
        _ => Value::String(text.to_owned()),
    })
}

fn kind(slot: &Value) -> &'static str {
    match slot {
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a finite number",
        Value::Boolean(_) => "true or false",
        _ => "a text",
    }
}

/// Digits with optional `_` and a k, M or G for a thousand, a million, a milliard.
fn whole(text: &str) -> Option<i64> {
    let text = text.replace('_', "");
    let (digits, factor) = match text.chars().last()? {
        'k' | 'K' => (&text[..text.len() - 1], 1_000),
        'M' => (&text[..text.len() - 1], 1_000_000),
        'G' => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text.as_str(), 1),
    };
    digits.parse::<i64>().ok()?.checked_mul(factor).filter(|n| *n >= 0)
}

fn show(value: &Value) -> String {
    match value {
        Value::String(text) => format!("`{text}`"),
        value => value.to_string(),
    }
}

/// An f32 as the shortest decimal that reads back to it: 0.1, not 0.10000000149011612.
pub(super) fn shortest<S: Serializer>(value: &f32, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(value.to_string().parse().unwrap_or(f64::from(*value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(error: Error) -> String {
        assert_eq!(error.exit_code(), 2, "{error}");
        format!("{error} / {}", error.hint().unwrap_or_default())
    }

    fn applied(pairs: &[(&str, &str)]) -> Result<Preset> {
        let mut preset = Preset::load("tiny").unwrap();
        preset.apply(&pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect::<Vec<_>>())?;
        preset.validate()?;
        Ok(preset)
    }

    #[test]
    fn keys_are_set_by_name_and_type() {
        let mut preset = Preset::load("tiny").unwrap();
        preset.set("model.hidden_size", "256").unwrap();
        preset.set("train.tokens", "2M").unwrap();
        preset.set("optimizer.learning_rate", "1e-3").unwrap();
        preset.set("data.source", "7").unwrap();
        assert_eq!((preset.model.hidden_size, preset.train.tokens), (256, 2_000_000));
        assert_eq!((preset.optimizer.learning_rate, preset.data.source.as_str()), (1e-3, "7"));
        assert!(said(preset.set("model.hiden_size", "1").unwrap_err()).contains("`model.hidden_size`"));
        assert!(said(preset.set("hidden_size", "1").unwrap_err()).contains("`model.hidden_size`"));
        assert!(said(preset.set("", "1").unwrap_err()).contains("unknown key"));
        assert!(said(preset.set("train.batch", "many").unwrap_err()).contains("`many` is not a whole number"));
        assert!(said(preset.set("train.batch", "-1").unwrap_err()).contains("not a whole number"));
        assert!(said(preset.set("train.seed", "99999999999999999999").unwrap_err()).contains("not a whole number"));
        assert!(said(preset.set("train.batch", "").unwrap_err()).contains("not a whole number"));
        assert!(said(preset.set("train.batch", "9é").unwrap_err()).contains("not a whole number"));
        assert!(said(preset.set("model.dropout", "nan").unwrap_err()).contains("finite"));
        assert!(said(preset.set("train.recompute", "yes").unwrap_err()).contains("true or false"));
    }

    #[test]
    fn files_are_held_against_the_template() {
        let text = Preset::load("tiny").unwrap().to_toml();
        let error = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            said(Preset::parse(&text.replace(from, to), Path::new("a.toml")).unwrap_err())
        };
        assert!(
            error("hidden_size = 128", "hidden_sise = 128")
                .contains("`model.hidden_sise` / did you mean `model.hidden_size`")
        );
        assert!(error("hidden_size = 128\n", "").contains("a.toml: no `model.hidden_size`"));
        assert!(
            error("hidden_size = 128", "hidden_size = \"x\"")
                .contains("model.hidden_size: \"x\" is not a whole number")
        );
        assert!(error("hidden_size = 128", "hidden_size = -1").contains("not a whole number"));
        assert!(error("hidden_size = 128", "hidden_size = ").contains("line"));
        assert!(error("[model]", "[modell]").contains("did you mean `model`"));
        assert!(error("name = \"tiny\"\n", "").contains("no `name`"));
        assert!(Preset::parse(&text.replace("clip = 1.0", "clip = 1"), Path::new("a.toml")).is_ok());
    }

    #[test]
    fn numbers_are_written_as_people_write_them() {
        let mut preset = Preset::load("tiny").unwrap();
        preset.set("model.dropout", "0.1").unwrap();
        preset.set("optimizer.weight_decay", "0.1").unwrap();
        let text = preset.to_toml();
        assert!(text.contains("dropout = 0.1\n") && text.contains("weight_decay = 0.1\n"), "{text}");
        assert_eq!(Preset::parse(&text, Path::new("a.toml")).unwrap(), preset);
    }

    #[test]
    fn one_horizon_puts_the_others_aside() {
        let preset = applied(&[("train.tokens", "1M")]).unwrap();
        assert_eq!((preset.train.steps, preset.train.tokens), (0, 1_000_000));
        assert!(said(applied(&[("train.tokens", "1M"), ("train.steps", "3")]).unwrap_err()).contains("how long"));
    }

    #[test]
    fn the_rest_of_the_shape_follows_the_hidden_size() {
        let shape = |pairs: &[(&str, &str)]| {
            let m = applied(pairs).unwrap().model;
            [m.hidden_size, m.num_attention_heads, m.num_key_value_heads, m.head_dim, m.intermediate_size]
        };
        assert_eq!(shape(&[]), [128, 4, 4, 32, 384]);
        assert_eq!(shape(&[("model.hidden_size", "256")]), [256, 8, 8, 32, 768]);
        assert_eq!(shape(&[("model.num_attention_heads", "2")]), [128, 2, 2, 64, 384]);
        assert_eq!(shape(&[("model.hidden_size", "192"), ("model.num_attention_heads", "3")]), [192, 3, 3, 64, 576]);
        assert_eq!(shape(&[("model.head_dim", "64")]), [128, 2, 2, 64, 384]);
        assert_eq!(shape(&[("model.head_dim", "64"), ("model.num_attention_heads", "4")]), [128, 4, 4, 64, 384]);
        assert_eq!(shape(&[("model.num_key_value_heads", "2")]), [128, 4, 2, 32, 384]);
        assert!(said(applied(&[("model.hidden_size", "200")]).unwrap_err()).contains("--hidden-size 192 or 224"));
        assert!(said(applied(&[("model.num_attention_heads", "3")]).unwrap_err()).contains("--heads 1 or 2 or 4"));
        assert!(said(applied(&[("model.num_attention_heads", "0")]).unwrap_err()).contains("num_attention_heads is 0"));
        assert!(said(applied(&[("model.hidden_size", "0")]).unwrap_err()).contains("hidden_size is 0"));
    }

    #[test]
    fn what_followed_is_told() {
        let mut preset = Preset::load("tiny").unwrap();
        let notes = preset.apply(&[("model.hidden_size".into(), "256".into())]).unwrap();
        assert_eq!(notes.len(), 3, "{notes:?}");
        assert!(notes.iter().any(|n| n.contains("intermediate_size = 768")));
    }
}
