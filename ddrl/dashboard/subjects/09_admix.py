"""Ad mixing: what the policy earned over a day beside baselines and the optimum, whom it delivered to, what its critic
expected, and how much its evaluations swing."""

import shlex
from pathlib import Path

import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.admix.account import NAME, Account, read_account
from ddrl.admix.environment import is_admix as is_admix_env
from ddrl.core.errors import plain_line
from ddrl.dashboard import watch
from ddrl.telemetry import Run


@st.cache_data(max_entries=8, show_spinner=False)
def account_of(path: Path, changed: float) -> Account | None:
    """The account as its file says; read anew when it has `changed`."""
    return read_account(path)


def charts(runs: watch.Runs) -> None:
    """The main run's account and critic; the swings of all chosen runs of ad mixing."""
    run = next(iter(runs.values()))
    if not is_admix(run):
        st.info(f"This run is not of ad mixing: its environment is {watch.literal(run.config.env.id)}.")
        return
    file = run.path / NAME
    account = account_of(run.path, file.stat().st_mtime if file.exists() else 0.0)
    names: list[str] = []
    if account is None:
        st.markdown("No days have been accounted yet:")
        st.code(plain_line(f"python -m ddrl.evaluate {shlex.quote(str(run.path))} --days 5"), language="bash")
    else:
        days(account)
        names = [f"contract {one.ad}" for one in account.contracts]
    critic(run, names)
    compared = {name: one for name, one in runs.items() if is_admix(one)}
    labels = plots.differing_labels({name: one.settings for name, one in compared.items()})
    tables = {name: one.evaluations() for name, one in compared.items()}
    watch.chart(st, plots.revenue_swings(tables, labels), "swings")
    st.caption(
        "How much a run swings: the standard deviation of its evaluations in the second half of training about a "
        "straight line. Choose runs at the left whose critic differs to compare them."
    )


def is_admix(run: Run) -> bool:
    """Whether a run is of ad mixing."""
    return is_admix_env(run.config.env.id)


def days(account: Account) -> None:
    """Revenue and delivery."""
    table = plots.scores_table(account)
    place = table["rule"].index("policy")
    st.markdown(
        f"**Score {table['score'][place]:.3f}** over {account.days} held-out "
        f"day{'s' if account.days > 1 else ''}: 0 is bids alone, 1 the optimum by linear program, certified to "
        f"{account.gap:.0e}. News of billing come after {account.delay:.0%} of the day."
    )
    left, right = st.columns(2)
    watch.chart(left, plots.revenue_over_day(account), "revenue")
    watch.chart(right, plots.revenue_left(account), "left")
    st.dataframe(pd.DataFrame(table), hide_index=True, height=36 * len(account.rules) + 38, key="admix scores")
    left, right = st.columns(2)
    watch.chart(left, plots.delivery_ahead(account), "ahead")
    ads = [one.ad for one in account.contracts]
    ad = right.selectbox(
        "Contract", ads, index=plots.latest_contract(account), key="contract", help="First: what misses most at the end"
    )
    watch.chart(right, plots.delivery(account, ads.index(ad if ad is not None else ads[0])), "delivery")
    watch.chart(st, plots.display_frequencies(account), "frequencies")
    st.caption(
        "A contract with a higher score should be shown more often: the solid line rises. Where it lies below the "
        "dashed one, other contracts won. Of the requests of one decision each contract has one share."
    )


def critic(run: Run, names: list[str]) -> None:
    """The return's distribution as the critic has it, beside the returns of the policy."""
    values = run.snapshot("values")
    if values is None:
        st.caption("The critic's distributions are drawn when the run ends; a scalar critic has none.")
        return
    steps = values["steps"]
    numbers = range(len(values["predicted"][0]))
    left, right = st.columns(2)
    step = left.segmented_control(
        "Step of play", steps, default=steps[0], key="step", format_func=lambda step: watch.literal(str(step))
    )
    moment = steps.index(step) if step in steps else 0
    number = 0
    if len(numbers) > 1:
        words = [names[each] if each < len(names) else f"part {each}" for each in numbers]
        number = words.index(left.selectbox("Return of", words, key="number") or words[0])
        names = words
    watch.chart(left, plots.predicted_returns(values, moment, number, of=names[number] if names else ""), "predicted")
    watch.chart(right, plots.state_value(values, moment, number), "state")


watch.live(charts)
