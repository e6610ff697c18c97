// Drives the Node SDKs: `node drive.mjs URL MODEL WHAT`, prints one line of JSON that the test looks at.
import { createRequire } from "node:module";

const [url, model, what, modules] = process.argv.slice(2);
const load = createRequire(modules + "/");
const OpenAI = load("openai");
const Anthropic = load("@anthropic-ai/sdk");

const openai = new OpenAI.OpenAI({ baseURL: url + "/v1", apiKey: "x", maxRetries: 0 });
const claude = new Anthropic.Anthropic({ baseURL: url, apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "Read it." }];
const schema = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const max_tokens = 12;

async function raised(promise) {
  try {
    await promise;
  } catch (error) {
    return [error.constructor.name, error.status ?? null, error.message];
  }
  return ["nothing"];
}

const does = {
  async streams() {
    const whole = await openai.chat.completions.create({ model, messages, max_tokens, temperature: 0 });
    const stream = await openai.chat.completions.create({
      model, messages, max_tokens, temperature: 0, stream: true, stream_options: { include_usage: true },
    });
    let said = "", usage = null;
    for await (const chunk of stream) {
      said += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    const response = openai.responses.stream({ model, input: "hi", max_output_tokens: max_tokens });
    const events = [];
    for await (const event of response) events.push(event.type);
    const message = claude.messages.stream({ model, messages, max_tokens });
    const parts = [];
    message.on("text", (text) => parts.push(text));
    const final = await message.finalMessage();
    return {
      same: said === whole.choices[0].message.content && said !== "",
      tokens: usage.completion_tokens,
      last: events.at(-1),
      message: parts.join("") === final.content[0].text && parts.length > 1,
    };
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "read", parameters: schema } }];
    const chat = await openai.chat.completions.create({ model, messages, tools, tool_choice: "required" });
    const used = await claude.messages.create({
      model, messages, max_tokens: 200, tools: [{ name: "read", input_schema: schema }], tool_choice: { type: "any" },
    });
    return {
      openai: JSON.parse(chat.choices[0].message.tool_calls[0].function.arguments),
      anthropic: used.content[0].input,
    };
  },
  async errors() {
    return {
      openai: await raised(openai.chat.completions.create({ model: "none", messages })),
      anthropic: await raised(claude.messages.create({ model: "none", messages, max_tokens })),
    };
  },
  async retries() {
    return (await openai.chat.completions.create({ model, messages, max_tokens }, { maxRetries: 2 })).object;
  },
  async openai_times_out() {
    return await raised(openai.chat.completions.create({ model, messages }, { timeout: 300 }));
  },
  async anthropic_times_out() {
    return await raised(claude.messages.create({ model, messages, max_tokens }, { timeout: 300 }));
  },
};
console.log(JSON.stringify(await does[what]()));
