//! A page around its text: the head, the menu, the way on.

use std::fmt::Write;

use super::address;
use super::contents::{self, Entry, Source};
use super::highlight::escaped;
use super::markdown::Rendered;

/// Where the style is on the site.
pub(crate) const STYLE: &str = "style.css";

/// Where an entry of the menu leads.
pub(crate) fn address_of(source: Source) -> String {
    match source {
        Source::Text(path) => address::on_site(path),
        Source::Module(name) => format!("python/{name}.html"),
        Source::Crate(name) => format!("rust/{name}/index.html"),
    }
}

/// A whole page, at its address.
pub(crate) fn page(at: &str, text: &Rendered) -> String {
    let root = address::root_from(at);
    let title = match at {
        "index.html" => text.title.clone(),
        _ => format!("{} · wholemem", text.title),
    };
    format!(
        "<!DOCTYPE html>\n\
         <html lang=\"en\">\n\
         <head>\n\
         <meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n\
         <link rel=\"stylesheet\" href=\"{root}{STYLE}\">\n\
         </head>\n\
         <body>\n\
         <header><a class=\"name\" href=\"{root}index.html\">wholemem</a> <a class=\"to-menu\" href=\"#menu\">Menu</a></header>\n\
         <main>\n{body}{way}</main>\n\
         {menu}\
         </body>\n\
         </html>\n",
        title = escaped(&title),
        body = text.html,
        way = way_on(at, &root),
        menu = menu(at, &root, text),
    )
}

/// All entries, and the sections of the page that is open.
fn menu(at: &str, root: &str, text: &Rendered) -> String {
    let mut html = "<nav id=\"menu\">\n".to_owned();
    for part in contents::PARTS {
        let _ = write!(html, "<h2>{}</h2>\n<ul>\n", part.title);
        for entry in part.entries {
            let to = address_of(entry.source);
            let open = to == at;
            let current = if open { " aria-current=\"page\"" } else { "" };
            let _ = write!(html, "<li><a href=\"{root}{to}\"{current}>{}</a>", escaped(entry.title));
            if open && text.sections.len() > 1 {
                html.push_str("\n<ul>\n");
                for section in &text.sections {
                    let title = escaped(&section.title);
                    let _ = writeln!(html, "<li><a href=\"#{}\">{title}</a></li>", section.place);
                }
                html.push_str("</ul>\n");
            }
            html.push_str("</li>\n");
        }
        html.push_str("</ul>\n");
    }
    html.push_str("</nav>\n");
    html
}

/// The entry before and the one behind, of those that are pages of this kind.
fn way_on(at: &str, root: &str) -> String {
    let pages: Vec<&Entry> =
        contents::entries().filter(|entry| !matches!(entry.source, Source::Crate(_))).collect();
    let Some(number) = pages.iter().position(|entry| address_of(entry.source) == at) else {
        return String::new();
    };
    let link = |entry: &&Entry, rel: &str| {
        let (to, title) = (address_of(entry.source), escaped(entry.title));
        format!("<a rel=\"{rel}\" href=\"{root}{to}\">{title}</a>")
    };
    let before = number.checked_sub(1).map(|number| link(&pages[number], "prev")).unwrap_or_default();
    let behind = pages.get(number + 1).map(|entry| link(entry, "next")).unwrap_or_default();
    format!("<footer>{before}{behind}</footer>\n")
}

#[cfg(test)]
mod tests {
    use super::super::markdown;
    use super::*;

    fn shown(at: &str, text: &str) -> String {
        page(at, &markdown::render(text, str::to_owned))
    }

    #[test]
    fn the_menu_opens_at_the_page_and_shows_its_sections() {
        let html = shown("docs/SECURITY.html", "# A & B\n## One\n## Two\n");
        assert!(html.contains("<title>A &amp; B · wholemem</title>"), "{html}");
        assert!(
            html.contains("<a href=\"../docs/SECURITY.html\" aria-current=\"page\">Security</a>\n<ul>"),
            "{html}"
        );
        assert!(html.contains("<li><a href=\"#one\">One</a></li>"), "{html}");
        assert_eq!(html.matches("aria-current").count(), 1);
    }

    #[test]
    fn pages_lead_to_the_one_before_and_the_one_behind() {
        let html = shown("index.html", "# wholemem\n");
        assert!(html.contains("<footer><a rel=\"next\" href=\"examples/index.html\">"), "{html}");
        let html = shown("examples/x.py.html", "# x\n");
        assert!(!html.contains("<footer>"), "{html}");
    }
}
