"""The dashboard, for `streamlit run dashboard/app.py [-- FOLDER]`: the page of `python -m ddrl.dashboard`."""

from ddrl.dashboard.app import main

main()
