// Yields the values of a stream with one JSON value per line, as they arrive.
export async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (unread + part.value).split("\n");
    unread = lines.pop();
    yield* lines.map((line) => JSON.parse(line));
  }
}
