//! Markdown as HTML: links led to the site, headings that can be linked to, code in colours.

use std::collections::BTreeMap;

use pulldown_cmark::{CodeBlockKind, CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

use super::highlight;

/// A text for a page.
#[derive(Debug)]
pub(crate) struct Rendered {
    /// Its first heading.
    pub(crate) title: String,
    pub(crate) html: String,
    /// Its headings of the second level.
    pub(crate) sections: Vec<Section>,
}

/// A part of a page that the menu names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Section {
    /// What it is linked to by, without the `#`.
    pub(crate) place: String,
    pub(crate) title: String,
}

/// A text as HTML. `link` says where the links and pictures of the text lead.
pub(crate) fn render(text: &str, mut link: impl FnMut(&str) -> String) -> Rendered {
    let options = Options::ENABLE_TABLES | Options::ENABLE_HEADING_ATTRIBUTES | Options::ENABLE_STRIKETHROUGH;
    let mut events = Parser::new_ext(text, options);
    let mut places = Places::default();
    let (mut title, mut sections, mut out) = (String::new(), Vec::new(), Vec::new());
    while let Some(event) = events.next() {
        match event {
            Event::Start(Tag::Heading { level, id, classes, attrs }) => {
                let inside = until(&mut events, TagEnd::Heading(level));
                let said = plain(&inside);
                let place = id.map_or_else(|| places.of(&said), |id| id.to_string());
                if title.is_empty() {
                    title.clone_from(&said);
                }
                if level == HeadingLevel::H2 {
                    sections.push(Section { place: place.clone(), title: said });
                }
                let here = format!("<a class=\"here\" href=\"#{place}\" aria-label=\"this place\">#</a>");
                out.push(Event::Start(Tag::Heading { level, id: Some(place.into()), classes, attrs }));
                out.extend(inside);
                out.push(Event::InlineHtml(here.into()));
                out.push(Event::End(TagEnd::Heading(level)));
            }
            Event::Start(Tag::CodeBlock(kind)) => {
                let code = plain(&until(&mut events, TagEnd::CodeBlock));
                let info = match &kind {
                    CodeBlockKind::Fenced(info) => &**info,
                    CodeBlockKind::Indented => "",
                };
                // Of our own tongue: `python torch` is Python that needs torch, and `rust,no_run` is rustdoc's.
                let (language, needs) = info.split_once(' ').unwrap_or((info, ""));
                let language = language.split(',').next().unwrap_or_default();
                let needs = match needs {
                    "" => String::new(),
                    needs => format!(" data-needs=\"{}\"", highlight::escaped(needs)),
                };
                let html = highlight::code(language, &code);
                out.push(Event::Html(format!("<pre{needs}><code>{html}</code></pre>\n").into()));
            }
            // Wider than a small screen, as a rule: it is moved in a frame of its own.
            Event::Start(Tag::Table(columns)) => {
                out.push(Event::Html("<div class=\"wide\">".into()));
                out.push(Event::Start(Tag::Table(columns)));
            }
            Event::End(TagEnd::Table) => {
                out.push(Event::End(TagEnd::Table));
                out.push(Event::Html("</div>\n".into()));
            }
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                let dest_url: CowStr<'_> = link(&dest_url).into();
                out.push(Event::Start(Tag::Link { link_type, dest_url, title, id }));
            }
            Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                let dest_url: CowStr<'_> = link(&dest_url).into();
                out.push(Event::Start(Tag::Image { link_type, dest_url, title, id }));
            }
            other => out.push(other),
        }
    }
    let mut html = String::new();
    html::push_html(&mut html, out.into_iter());
    Rendered { title, html, sections }
}

/// What comes before an end, which is taken too.
fn until<'a>(events: &mut Parser<'a>, end: TagEnd) -> Vec<Event<'a>> {
    events.take_while(|event| *event != Event::End(end)).collect()
}

/// The words of some events, without their marks.
fn plain(events: &[Event<'_>]) -> String {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Text(text) | Event::Code(text) => Some(&**text),
            Event::SoftBreak => Some(" "),
            _ => None,
        })
        .collect()
}

/// The places of headings, no two alike on a page: as GitHub makes them, so that links are good there and here.
#[derive(Debug, Default)]
struct Places {
    taken: BTreeMap<String, usize>,
}

impl Places {
    fn of(&mut self, heading: &str) -> String {
        let kept = heading.chars().filter(|sign| sign.is_alphanumeric() || " -_".contains(*sign));
        let place = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let count = self.taken.entry(place.clone()).or_default();
        *count += 1;
        if *count == 1 { place } else { format!("{place}-{}", *count - 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn as_is(text: &str) -> Rendered {
        render(text, str::to_owned)
    }

    #[test]
    fn headings_have_places_of_which_no_two_are_alike() {
        let rendered = as_is("# A page\n## On a GPU, *now*\n## Twice\n### Twice\n## `f` {#mine}\n");
        assert_eq!(rendered.title, "A page");
        let sections = [("on-a-gpu-now", "On a GPU, now"), ("twice", "Twice"), ("mine", "f")];
        let sections =
            sections.map(|(place, title)| Section { place: place.to_owned(), title: title.to_owned() });
        assert_eq!(rendered.sections, sections);
        assert!(rendered.html.contains("<h3 id=\"twice-1\">Twice<a"), "{}", rendered.html);
        assert!(rendered.html.contains("<h2 id=\"mine\"><code>f</code><a"), "{}", rendered.html);
    }

    #[test]
    fn links_and_pictures_lead_where_they_are_told_to() {
        let rendered = render("[a](b.md) ![c](d.svg)", |link| format!("x/{link}?\"&"));
        assert_eq!(
            rendered.html,
            "<p><a href=\"x/b.md?%22&amp;\">a</a> <img src=\"x/d.svg?%22&amp;\" alt=\"c\" /></p>\n"
        );
    }

    #[test]
    fn code_is_shown_as_it_is_written() {
        let rendered = as_is("```rust,no_run\na < b && c\n```\n");
        assert_eq!(rendered.html, "<pre><code>a &lt; b &amp;&amp; c\n</code></pre>\n");
    }

    #[test]
    fn code_says_what_it_needs() {
        let rendered = as_is("```python torch\nx\n```\n");
        assert_eq!(rendered.html, "<pre data-needs=\"torch\"><code>x\n</code></pre>\n");
    }

    #[test]
    fn tables_are_framed() {
        let html = as_is("| a |\n|---|\n| b |\n").html;
        assert!(html.starts_with("<div class=\"wide\"><table>"), "{html}");
        assert!(html.trim_end().ends_with("</table>\n</div>"), "{html}");
    }
}
