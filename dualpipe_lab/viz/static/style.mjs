// The style sheet of the drawings.  bundle.py writes style.css in its place.
export const STYLE = "";
