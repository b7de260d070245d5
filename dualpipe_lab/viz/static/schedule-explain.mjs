export const explainStart = () => ({ text: "stub" });
