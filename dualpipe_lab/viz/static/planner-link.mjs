// A plan in the address of a page: "#plan&model=llama3-8b&gpus=8...".  Values that the page does not offer are left out.

export function hashOf(choice) {
  return `#plan&${Object.entries(choice).map(([name, value]) => `${name}=${value}`).join("&")}`;
}

// The value that a text names: one of a list, or a whole number from 1 to the largest that is offered.
function valueOfText(text, offered) {
  if (typeof offered !== "number") return (offered ?? []).find((one) => String(one) === text);
  return /^[1-9]\d*$/.test(text) && Number(text) <= offered ? Number(text) : undefined;
}

// {choice, wrong}: the parts of a plan in an address, and those that the page does not have; null without a plan.
export function choiceOf(hash, offered) {
  const [mark, ...parts] = hash.slice(1).split("&");
  if (mark !== "plan") return null;
  const choice = {}, wrong = [];
  for (const part of parts) {
    const [name, text] = part.split("=").map(decodeURIComponent), value = valueOfText(text, offered[name]);
    if (value === undefined) wrong.push(part);
    else choice[name] = value;
  }
  return { choice, wrong };
}
