// A plan in the address of a page: "#plan&model=llama3-8b&gpus=8...".  Values that the page does not offer are left out.

export function hashOf(choice) {
  return `#plan&${Object.entries(choice).map(([name, value]) => `${name}=${value}`).join("&")}`;
}

// {choice, wrong}: the parts of a plan in an address, and those that the page does not have; null without a plan.
export function choiceOf(hash, offered) {
  const [mark, ...parts] = hash.slice(1).split("&");
  if (mark !== "plan") return null;
  const choice = {}, wrong = [];
  for (const part of parts) {
    const [name, text] = part.split("=").map(decodeURIComponent), values = offered[name] ?? [];
    const value = values.find((one) => String(one) === text);
    if (value === undefined) wrong.push(part);
    else choice[name] = value;
  }
  return { choice, wrong };
}
